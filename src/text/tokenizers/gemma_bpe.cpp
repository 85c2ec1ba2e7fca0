#include "text/tokenizers/subword_model.h"

#include <array>

#include "core/error.h"
#include "text/tokenizers/pair_merging.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

class GemmaBpe : public SubwordModel {
 public:
  GemmaBpe(const SentencePieceModel& model, const std::string& unknown, const std::string& source) {
    for (const auto& piece : model.pieces) {
      vocabulary_.set(piece.text, static_cast<int64_t>(pieces_.size()));
      pieces_.push_back(piece.text);
    }
    const std::optional<int64_t> unknown_id = vocabulary_.find(unknown);
    if (!unknown_id) fail("tokenizer", "{} has no token {}", source, unknown);
    unknown_id_ = *unknown_id;
    for (unsigned byte = 0; byte < 256; ++byte)
      byte_ids_[byte] = vocabulary_.find(fmt::format("<0x{:02X}>", byte));
  }

  std::string normalize(std::string_view text) const override {
    std::string result;
    result.reserve(text.size() + text.size() / 2);
    for (const char byte : text)
      if (byte == ' ')
        result += kSpaceMark;
      else
        result += byte;
    return result;
  }

  void encode(std::string_view text, TokenIds& ids) const override {
    TokenIds symbols;
    bool was_unknown = false;  // neighbouring unknown characters become one token
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      next_code_point(text, i);
      const std::string_view character = text.substr(begin, i - begin);
      if (const std::optional<int64_t> id = vocabulary_.find(character)) {
        symbols.push_back(*id);
        was_unknown = false;
      } else if (!append_bytes(character, symbols)) {
        if (!was_unknown) symbols.push_back(unknown_id_);
        was_unknown = true;
      }
    }
    merge_pairs(symbols, [this](int64_t left, int64_t right) { return merge_of(left, right); });
    ids.insert(ids.end(), symbols.begin(), symbols.end());
  }

  std::optional<int64_t> id_of(std::string_view token) const override { return vocabulary_.find(token); }
  int64_t vocabulary_size() const override { return vocabulary_.size(); }

 private:
  bool append_bytes(std::string_view character, TokenIds& symbols) const {
    for (const char byte : character)
      if (!byte_ids_[static_cast<unsigned char>(byte)]) return false;
    for (const char byte : character) symbols.push_back(*byte_ids_[static_cast<unsigned char>(byte)]);
    return true;
  }

  // Two pieces merge if their joined text is a piece. Lower ids merge first; for equal ids, the pair with the
  // shortest left part.
  std::optional<Merge> merge_of(int64_t left, int64_t right) const {
    const std::optional<int64_t> id = vocabulary_.find(pieces_[left] + pieces_[right]);
    if (!id) return std::nullopt;
    const auto rank =
        static_cast<uint64_t>(*id) << 32 | static_cast<uint64_t>(count_code_points(pieces_[left]));
    return Merge{rank, *id};
  }

  Vocabulary vocabulary_;
  std::vector<std::string> pieces_;  // by id
  std::array<std::optional<int64_t>, 256> byte_ids_;
  int64_t unknown_id_ = 0;
};

}  // namespace

std::unique_ptr<SubwordModel> make_gemma_bpe(const SentencePieceModel& model, const std::string& unknown,
                                             const std::string& source) {
  return std::make_unique<GemmaBpe>(model, unknown, source);
}

}  // namespace kiln::text
