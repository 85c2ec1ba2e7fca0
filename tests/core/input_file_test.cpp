#include "core/files/input_file.h"

#include <sys/stat.h>

#include "core/files/atomic_file.h"
#include "core/files/mapped_file.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(InputFile, OnlyRegularFilesAreOpened) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto& [path, what] :
       {std::pair(folder / "pipe", "pipe"), std::pair(folder.path().string(), "folder")}) {
    EXPECT_ERROR(open_input("test", path), what) << path;
    EXPECT_THROW(input_stream("test", path), NoSuchFile);
    EXPECT_THROW(MappedFile("test", path), NoSuchFile);
  }
  EXPECT_THROW(read_input("test", folder / "absent", 10), NoSuchFile);
  write_bytes(folder / "text", "two\nlines");
  std::string line;
  std::getline(input_stream("test", folder / "text"), line);
  EXPECT_EQ(line, "two");
  EXPECT_EQ(read_input("test", folder / "text", 9), "two\nlines");
  EXPECT_ERROR(read_input("test", folder / "text", 8), "at most 8 bytes, it has 9");
}

TEST(InputFileDeathTest, Finding12AFileThatIsCutWhileItIsReadIsNamed) {
  const TempFolder folder;
  const std::string path = folder / "weights";
  write_bytes(path, std::string(1 << 20, 'x'));
  EXPECT_EXIT(
      {
        const MappedFile file("test", path);
        std::filesystem::resize_file(path, 0);
        volatile std::byte last = file.bytes().back();
        static_cast<void>(last);
      },
      testing::ExitedWithCode(1), "kiln: .*weights can no longer be read");
}

TEST(AppendLine, Finding14ATornLineStaysALineOfItsOwn) {
  const TempFolder folder;
  write_bytes(folder / "torn", "{\"a\": 1}\n{\"a\":");
  append_line("test", folder / "torn", "{\"a\": 2}");
  append_line("test", folder / "torn", "{\"a\": 3}");
  EXPECT_EQ(read_bytes(folder / "torn"), "{\"a\": 1}\n{\"a\":\n{\"a\": 2}\n{\"a\": 3}\n");
  std::filesystem::create_symlink(folder / "torn", folder / "link");
  EXPECT_ERROR(append_line("test", folder / "link", "x"), "cannot write");
}

}  // namespace
}  // namespace kiln
