// SentencePiece's compiled normalization rules: a double-array trie (Darts) of what is replaced, and the
// replacements.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kiln::text {

class Charsmap {
 public:
  // `compiled`: size of the trie in bytes (u32), the trie (u32 each), replacements that end in NUL. Empty: no
  // rules. Throws Error naming `source` when it is broken.
  Charsmap(std::string_view compiled, const std::string& source);

  // The longest rule at each position replaces what it matches.
  std::string apply(std::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string replacements_;
};

}  // namespace kiln::text
