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
  for (const std::string what : {"pipe", "folder"}) {
    const std::string path = what == "pipe" ? folder / "pipe" : folder.path().string();
    EXPECT_ERROR(open_input("test", path), what) << path;
    EXPECT_THROW(LineReader("test", path), NoSuchFile);
    EXPECT_THROW(MappedFile("test", path), NoSuchFile);
  }
  EXPECT_THROW(read_input("test", folder / "absent", 10), NoSuchFile);
  write_bytes(folder / "text", "two\nlines");
  EXPECT_EQ(read_input("test", folder / "text", 9), "two\nlines");
  EXPECT_ERROR(read_input("test", folder / "text", 8), "at most 8 bytes, it has 9");
}

TEST(LineReader, LinesOfAnyLengthAndATornLastOne) {
  const TempFolder folder;
  const std::string path = folder / "lines", long_line(200'000, 'x');
  write_bytes(path, "one\n\n" + long_line + "\ntorn");
  LineReader file("test", path);
  std::string line;
  for (const std::string& expected : {std::string("one"), std::string(), long_line}) {
    EXPECT_TRUE(file.next(line));
    EXPECT_EQ(line, expected);
    EXPECT_TRUE(file.is_whole());
  }
  EXPECT_TRUE(file.next(line));
  EXPECT_EQ(line, "torn");
  EXPECT_FALSE(file.is_whole());
  EXPECT_FALSE(file.next(line));
}

TEST(LineReader, WhatCannotBeReadIsNotTheEnd) {
  const TempFolder folder;
  const std::string path = folder / "lines";
  write_bytes(path, "one\ntwo\n");
  LineReader file("test", path);
  std::filesystem::resize_file(path, 4);
  std::string line;
  EXPECT_ERROR(file.next(line), "lines became shorter");
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
