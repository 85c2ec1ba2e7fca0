#include "core/text/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/text/utf8.h"

namespace kiln {
namespace {

// True for the characters that turn the direction of the text around them: U+061C, U+200E, U+200F, U+202A to
// U+202E and U+2066 to U+2069.
bool turns_text(std::string_view character) {
  const auto last = static_cast<unsigned char>(character.back());
  if (character.starts_with("\xE2\x80"))
    return last == 0x8E || last == 0x8F || (last >= 0xAA && last <= 0xAE);
  if (character.starts_with("\xE2\x81")) return last >= 0xA6 && last <= 0xA9;
  return character == "\xD8\x9C";
}

// Returns the bytes of the character that `text` begins with; 0 if it is not UTF-8, a control character, or
// turns text.
size_t printable_bytes(std::string_view text) {
  const size_t count = utf8_bytes(text);
  if (count > 1 && turns_text(text.substr(0, count))) return 0;
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
