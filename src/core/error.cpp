#include "core/error.h"

namespace kiln {

namespace {

std::string without_bracket(const std::string& text) {
  const size_t end = text.starts_with("[") ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

std::string message_of(const std::exception& error) {
  std::string text = error.what();
  if (dynamic_cast<const Error*>(&error)) return text;
  const std::string line = text.substr(0, text.find('\n'));
  return line.starts_with("[/") ? without_bracket(line) : line;
}

std::string bare_message_of(const std::exception& error) { return without_bracket(message_of(error)); }

}  // namespace kiln
