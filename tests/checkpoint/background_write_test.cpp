#include "checkpoint/file_parts.h"

#include <sys/resource.h>

#include <csignal>
#include <memory>

#include "test_files.h"

namespace kiln {
namespace {

class BackgroundWrites : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  std::string content(const std::string& name) const { return test::read_bytes(path(name)); }

  test::TempFolder folder_;
};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST_F(BackgroundWrites, PartsOfSeveralWritersMakeTheFiles) {
  create_file_of_parts(path("a"), 10);
  create_file_of_parts(path("b"), 6);
  const std::string head = "head", first = "ABC", second = "DEF";
  FileParts files({path("a"), path("b")});
  files.write(0, 0, bytes_of(head));
  BackgroundWrite one(std::move(files), {{0, 4, bytes_of(first)}, {1, 3, bytes_of(second)}});
  BackgroundWrite two(FileParts({path("a"), path("b")}), {{1, 0, bytes_of(first)}, {0, 7, bytes_of(second)}});
  EXPECT_EQ(one.wait(), "");
  EXPECT_EQ(two.wait(), "");
  EXPECT_TRUE(one.done() && two.done());
  EXPECT_EQ(content("a"), "headABCDEF");
  EXPECT_EQ(content("b"), "ABCDEF");
  for (const size_t file : {0, 1}) {
    FileChecksum written = one.checksums()[file];
    written.merge(two.checksums()[file]);
    const uint64_t size = file == 0 ? 10 : 6;
    EXPECT_EQ(written.of_file(size), checksum_of_bytes(path(file == 0 ? "a" : "b"), 0, size).of_file(size));
  }
}

// One that ends before it can be given up proves nothing: then it is tried again.
TEST_F(BackgroundWrites, GivingUpEndsWithoutWaitingForAll) {
  constexpr size_t kParts = 100'000;
  const std::string byte = "x";
  bool ended_early = false;
  for (int attempt = 0; attempt < 100 && !ended_early; ++attempt) {
    create_file_of_parts(path("a"), kParts);
    std::vector<FilePart> parts;
    for (size_t i = 0; i < kParts; ++i) parts.push_back({0, i, bytes_of(byte)});
    { const BackgroundWrite write(FileParts({path("a")}), std::move(parts)); }
    ended_early = content("a").back() == 0;
  }
  EXPECT_TRUE(ended_early);
}

TEST_F(BackgroundWrites, AFullDiskIsKnownBeforeAnythingIsWritten) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 1000, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_ERROR(create_file_of_parts(path("a"), 1001), "File too large: free some space");
  create_file_of_parts(path("b"), 1000);
  const std::string part(10, 'x');
  BackgroundWrite write(FileParts({path("b")}), {{0, 995, bytes_of(part)}});
  EXPECT_THAT(write.wait(), HasSubstr("b: File too large"));
  EXPECT_TRUE(write.done());
  setrlimit(RLIMIT_FSIZE, &before);
}

TEST_F(BackgroundWrites, AMissingFileIsNamed) {
  create_file_of_parts(path("a"), 4);
  EXPECT_ERROR(FileParts({path("a"), path("absent")}), "absent: No such file or directory");
  EXPECT_ERROR(create_file_of_parts(path("absent/a"), 4), "the folder does not exist");
}

}  // namespace
}  // namespace kiln
