#include "core/files/text_file.h"

#include <sys/stat.h>

#include <thread>

#include "core/json_config.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(TextFile, AnOptionNamesAFileOrIsTheText) {
  const test::TempFolder folder;
  const auto read = [](const std::string& value) { return read_text_option("test", "--text", value); };
  test::write_bytes(folder / "unix", "one\ntwo\n");
  test::write_bytes(folder / "windows", "one\r\ntwo\r\n");
  test::write_bytes(folder / "open", "one\ntwo");
  for (const char* name : {"unix", "windows", "open"}) EXPECT_EQ(read(folder / name), "one\ntwo") << name;
  EXPECT_EQ(read("/dev/null"), "");
  const std::string is_text[] = {"", "Describe it: ", folder / "absent", folder.path().string(),
                                 std::string(100'000, '/')};
  for (const std::string& text : is_text) EXPECT_EQ(read(text), text);
}

// As in a shell's <(...).
TEST(TextFile, APipeIsAFile) {
  const test::TempFolder folder;
  const std::string pipe = folder / "pipe", sent(300'000, 'x');
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(pipe) << sent << '\n'; });
  EXPECT_EQ(read_text_option("test", "--text", pipe), sent);
  writer.join();
}

TEST(TextFile, WhatCannotBeReadIsNamed) {
  const test::TempFolder folder;
  const auto message = [](const std::string& path) {
    return message_of([&] { read_text_option("test", "--text", path); });
  };
  test::write_bytes(folder / "large", std::string(kMostTextBytes, 'x'));
  EXPECT_EQ(read_text_option("test", "--text", folder / "large").size(), kMostTextBytes);
  test::write_bytes(folder / "larger", std::string(kMostTextBytes + 1, 'x'));
  EXPECT_THAT(message(folder / "larger"), has_all("--text", folder / "larger", "1048576 bytes"));
  EXPECT_THAT(message("/dev/zero"), HasSubstr("it has more"));
  // A file that even its owner cannot read from its beginning.
  EXPECT_THAT(message("/proc/self/mem"), HasSubstr("--text] cannot read /proc/self/mem: Input/output error"));
}

TEST(TextFile, ReplacesEveryPlace) {
  EXPECT_EQ(replaced("abab", "ab", "x"), "xx");
  EXPECT_EQ(replaced("aab", "ab", "b"), "ab") << "what comes of it is left alone";
  EXPECT_EQ(replaced("abc", "d", "x"), "abc");
  EXPECT_EQ(replaced("", "d", "x"), "");
}

}  // namespace
}  // namespace kiln
