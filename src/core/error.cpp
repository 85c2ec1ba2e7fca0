#include "core/error.h"

#include <new>

namespace kiln {

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return "there is not enough memory for what was asked";
  std::string text = error.what();
  if (!dynamic_cast<const Error*>(&error)) text = text.substr(0, text.find('\n'));
  constexpr size_t kMostShown = 4000, kLastShown = 1000;  // a value of a file may be long
  if (text.size() > kMostShown) text.replace(kMostShown - kLastShown, text.size() - kMostShown, " ... ");
  const size_t end = text.starts_with("[") ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace kiln
