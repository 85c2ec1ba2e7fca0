#include "core/files/input_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/files/atomic_file.h"
#include "core/files/mapped_file.h"
#include "test_files.h"

namespace kiln {
namespace {

using test::message_of;
using testing::HasSubstr;

TEST(InputFile, OnlyRegularFilesAreOpened) {
  const test::TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto& [path, what] :
       {std::pair(folder / "pipe", "pipe"), std::pair(folder.path().string(), "folder")}) {
    EXPECT_THAT(message_of([&, path = path] { open_input("test", path); }), HasSubstr(what)) << path;
    EXPECT_THROW(input_stream("test", path), NoSuchFile);
    EXPECT_THROW(MappedFile("test", path), NoSuchFile);
  }
  EXPECT_THROW(read_input("test", folder / "absent", 10), NoSuchFile);
  test::write_bytes(folder / "text", "two\nlines");
  std::string line;
  std::getline(input_stream("test", folder / "text"), line);
  EXPECT_EQ(line, "two");
  EXPECT_EQ(read_input("test", folder / "text", 9), "two\nlines");
  EXPECT_THAT(message_of([&] { read_input("test", folder / "text", 8); }),
              HasSubstr("at most 8 bytes, it has 9"));
}

TEST(InputFileDeathTest, Finding12AFileThatIsCutWhileItIsReadIsNamed) {
  const test::TempFolder folder;
  const std::string path = folder / "weights";
  test::write_bytes(path, std::string(1 << 20, 'x'));
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
  const test::TempFolder folder;
  test::write_bytes(folder / "torn", "{\"a\": 1}\n{\"a\":");
  append_line("test", folder / "torn", "{\"a\": 2}");
  append_line("test", folder / "torn", "{\"a\": 3}");
  EXPECT_EQ(test::read_bytes(folder / "torn"), "{\"a\": 1}\n{\"a\":\n{\"a\": 2}\n{\"a\": 3}\n");
  std::filesystem::create_symlink(folder / "torn", folder / "link");
  EXPECT_THAT(message_of([&] { append_line("test", folder / "link", "x"); }), HasSubstr("cannot write"));
}

}  // namespace
}  // namespace kiln
