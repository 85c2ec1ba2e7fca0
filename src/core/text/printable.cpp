#include "core/text/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/text/utf8.h"

namespace kiln {
namespace {

// Returns the bytes of the character that `text` begins with; 0 if it is not UTF-8 or a control character.
size_t printable_bytes(std::string_view text) {
  const size_t count = utf8_bytes(text);
  const auto first = static_cast<unsigned char>(text.front());
  if (count == 1) return first >= 0x20 && first != 0x7F ? 1 : 0;
  const bool is_control = first == 0xC2 && count == 2 && static_cast<unsigned char>(text[1]) < 0xA0;
  return is_control ? 0 : count;  // U+0080 to U+009F
}

}  // namespace

std::string printable(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const bool is_kept = kept.find(text.front()) != kept.npos;
    const size_t count = is_kept ? 1 : printable_bytes(text);
    if (count > 0)
      result += text.substr(0, count);
    else
      fmt::format_to(std::back_inserter(result), "\\x{:02x}", static_cast<unsigned char>(text.front()));
    text.remove_prefix(std::max<size_t>(count, 1));
  }
  return result;
}

}  // namespace kiln
