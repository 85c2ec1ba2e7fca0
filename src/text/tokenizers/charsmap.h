// SentencePiece's compiled normalization rules: a double-array trie (Darts) of the texts to replace, and
// their replacements.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kiln::text {

class Charsmap {
 public:
  // `compiled` holds the size of the trie in bytes (u32), the trie (u32 each) and replacements that end in
  // NUL. Empty: no rules. Throws Error naming `source` when it is broken.
  Charsmap(std::string_view compiled, const std::string& source);

  // Applies the longest rule that matches at each position.
  std::string apply(std::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string replacements_;
};

}  // namespace kiln::text
