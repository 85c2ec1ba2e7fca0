#include "core/error.h"

namespace kiln {

std::string message_of(const std::exception& error) {
  std::string text = error.what();
  if (!dynamic_cast<const Error*>(&error)) text = text.substr(0, text.find('\n'));
  const size_t end = text.starts_with("[") ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace kiln
