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

}  // namespace kiln
