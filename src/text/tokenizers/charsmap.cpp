#include "text/tokenizers/charsmap.h"

#include <cstring>

#include "core/error.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

// Fields of a unit of the double array.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7FFFFFFF; }
uint32_t label_of(uint32_t unit) { return unit & (0x80000000u | 0xFF); }
uint32_t offset_of(uint32_t unit) { return (unit >> 10) << ((unit & 1u << 9) >> 6); }

}  // namespace

Charsmap::Charsmap(std::string_view compiled, const std::string& source) {
  if (compiled.empty()) return;
  const auto broken = [&] { fail("tokenizer", "the normalization rules of {} are broken", source); };
  uint32_t trie_bytes = 0;
  if (compiled.size() < sizeof trie_bytes) broken();
  std::memcpy(&trie_bytes, compiled.data(), sizeof trie_bytes);
  compiled.remove_prefix(sizeof trie_bytes);
  if (trie_bytes > compiled.size() || trie_bytes % sizeof(uint32_t) != 0 || trie_bytes == 0) broken();
  units_.resize(trie_bytes / sizeof(uint32_t));
  std::memcpy(units_.data(), compiled.data(), trie_bytes);
  replacements_ = compiled.substr(trie_bytes);
  // apply() checks positions itself but relies on replacements that end.
  if (!replacements_.ends_with('\0')) broken();
}

std::string Charsmap::apply(std::string_view text) const {
  if (units_.empty()) return std::string(text);
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    size_t matched = 0;
    uint32_t replacement = 0;
    size_t position = offset_of(units_[0]);
    for (size_t k = i; k < text.size(); ++k) {
      const auto byte = static_cast<unsigned char>(text[k]);
      position ^= byte;
      if (position >= units_.size() || label_of(units_[position]) != byte) break;
      const bool ends_here = has_leaf(units_[position]);
      position ^= offset_of(units_[position]);
      if (position >= units_.size()) break;
      if (!ends_here) continue;
      matched = k + 1 - i;
      replacement = value_of(units_[position]);
    }
    if (matched > 0 && replacement < replacements_.size()) {
      result += replacements_.data() + replacement;
      i += matched;
    } else {
      append_utf8(result, next_code_point(text, i));
    }
  }
  return result;
}

}  // namespace kiln::text
