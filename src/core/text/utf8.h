// UTF-8: what is, and text that may not be. Torch-free.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace kiln {

// Returns the bytes of the character that `text` begins with; 0 if it begins with none, or is empty. Strict
// (RFC 3629): no longer form than needed, no surrogates, nothing beyond U+10FFFF.
size_t utf8_bytes(std::string_view text);
bool is_utf8(std::string_view text);

// Returns the text with what is not UTF-8 replaced by U+FFFD: file names may hold anything, JSON may not.
std::string in_utf8(const std::string& text);
// Returns the text of a JSON value of which strings may hold anything, replaced likewise.
template <class Json>
std::string dump_utf8(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace kiln
