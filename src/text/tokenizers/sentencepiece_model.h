// The file of a SentencePiece model (Kudo & Richardson 2018): a protocol buffer of pieces and settings, and
// its normalization rules.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace kiln::text {

// Stands for a space in pieces.
inline constexpr std::string_view kSpaceMark = "\u2581";

struct SentencePieceModel {
  enum class Kind { kUnigram = 1, kBpe = 2, kWord = 3, kChar = 4 };
  enum class PieceKind { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  struct Piece {
    std::string text{};
    float score = 0;
    PieceKind kind = PieceKind::kNormal;
  };

  std::vector<Piece> pieces{};  // by id
  Kind kind = Kind::kUnigram;
  std::string charsmap{};  // normalization rules as compiled by the trainer (Charsmap); may be empty
};

// Throws Error naming `source` if the bytes are no such model.
SentencePieceModel parse_sentencepiece_model(std::string_view bytes, const std::string& source);
SentencePieceModel read_sentencepiece_model(const std::filesystem::path& path);

// The compiled rules: a double-array trie (Darts) of the texts to replace, and their replacements.
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
