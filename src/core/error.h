// Errors. A user's mistake is thrown as kiln::Error and ends as one line and exit status 1 in main();
// a broken invariant is an assert or std::logic_error.
#pragma once
#include <fmt/format.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kiln {

// what() is one line: "[who] expected X, got Y (where it came from): what to do".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws Error("[who] message").
template <class... Args>
[[noreturn]] void fail(std::string_view who, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format("[{}] {}", who, fmt::format(format, std::forward<Args>(args)...)));
}

// Returns what() without "[who] ", without the backtrace that LibTorch appends and without the source
// location that c10d prepends: "[/path/pair.cc:538] Connection closed" becomes "Connection closed". The
// middle of a long text is left out.
std::string message_of(const std::exception& error);

}  // namespace kiln
