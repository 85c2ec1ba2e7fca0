#include "core/text/utf8.h"

#include "core/json.h"

namespace kiln {

size_t utf8_bytes(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  bool is_valid = first >= 0xC2 && first <= 0xF4;
  for (size_t i = 1; i < count; ++i) is_valid = is_valid && (byte(i) & 0xC0) == 0x80;
  if (first == 0xE0) is_valid = is_valid && second >= 0xA0;  // only the shortest form
  if (first == 0xED) is_valid = is_valid && second < 0xA0;   // no surrogates
  if (first == 0xF0) is_valid = is_valid && second >= 0x90;
  if (first == 0xF4) is_valid = is_valid && second < 0x90;
  return is_valid ? count : 0;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t count = utf8_bytes(text);
    if (count == 0) return false;
    text.remove_prefix(count);
  }
  return true;
}

std::string in_utf8(const std::string& text) {
  if (is_utf8(text)) return text;
  return nlohmann::json::parse(dump_utf8(nlohmann::json(text))).get<std::string>();
}

}  // namespace kiln
