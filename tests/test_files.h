// Temporary folders, raw files, messages and matchers: what tests of every room share.
#pragma once
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <concepts>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "core/error.h"

namespace kiln::test {

// A folder that is removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kiln-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

inline std::string read_bytes(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// What an action prints.
template <class Action>
std::string stdout_of(Action&& action) {
  ::testing::internal::CaptureStdout();
  action();
  return ::testing::internal::GetCapturedStdout();
}
template <class Action>
std::string stderr_of(Action&& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

// The descriptor of the only BlockStore there is, whose file has no name to be opened by; -1: there is none.
inline int descriptor_of_store() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).string().find(".kiln-state-") != std::string::npos)
      return std::stoi(entry.path().filename());
  }
  return -1;
}

// From here on the disk of that store refuses to read, whatever is being written to it. False: it cannot be
// done.
inline bool break_store() {
  const int descriptor = descriptor_of_store();
  const int write_only = open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_WRONLY | O_CLOEXEC);
  const bool done = write_only >= 0 && dup2(write_only, descriptor) == descriptor;
  close(write_only);
  return done;
}

// The message of the Error that `action` must throw; it must be one line. Not for an exception itself, whose
// message core/error.h gives.
template <std::invocable Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), message.npos) << message;
    return message;
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

// The text holds each of these.
template <class... Texts>
auto has_all(const Texts&... texts) {
  return ::testing::AllOf(::testing::HasSubstr(std::string(texts))...);
}

}  // namespace kiln::test

// The statement throws an Error of one line, which holds each of the texts.
#define EXPECT_ERROR(statement, ...) \
  EXPECT_THAT(::kiln::test::message_of([&] { statement; }), ::kiln::test::has_all(__VA_ARGS__))

// What most tests name.
namespace kiln {
using test::TempFolder, test::has_all, test::message_of, test::read_bytes, test::stderr_of, test::stdout_of,
    test::write_bytes;
using ::testing::AllOf, ::testing::ElementsAre, ::testing::EndsWith, ::testing::HasSubstr, ::testing::IsEmpty,
    ::testing::Not, ::testing::StartsWith, ::testing::ThrowsMessage;
}  // namespace kiln
