// The kinds of tokenizers that turn plain text into ids: their interface, and one function that makes each.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizers/sentencepiece_model.h"

namespace kiln::text {

using TokenIds = std::vector<int64_t>;

class SubwordModel {
 public:
  virtual ~SubwordModel() = default;
  // Returns valid UTF-8 in the form that the vocabulary was made for: lower case, without accents, composed,
  // ...
  virtual std::string normalize(std::string_view text) const = 0;
  // Appends the ids of normalized text between added tokens.
  virtual void encode(std::string_view normalized, TokenIds& ids) const = 0;
  virtual std::optional<int64_t> id_of(std::string_view token) const = 0;
  virtual int64_t vocabulary_size() const = 0;
};

// CLIP's byte-level byte-pair encoding (Radford et al. 2021): vocab.json, merges.txt, words that end in </w>.
// Throws Error when a file is missing or broken, or when the vocabulary lacks a merged token or `unknown`.
std::unique_ptr<SubwordModel> load_clip_bpe(const std::filesystem::path& vocabulary,
                                            const std::filesystem::path& merges, const std::string& unknown);

// SentencePiece's byte-pair encoding with bytes for unknown characters, as Gemma uses it.
// Spaces become marks; nothing else is normalized. `unknown` is the token of characters that have no byte
// tokens either. Throws Error naming `source` when there is no such token.
std::unique_ptr<SubwordModel> make_gemma_bpe(const SentencePieceModel& model, const std::string& unknown,
                                             const std::string& source);

// SentencePiece's unigram language model (Kudo 2018), as T5 uses it.
// `num_extra_ids` sentinels follow the pieces, <extra_id_0> as the last one. `source` is named in errors. The
// pieces are those of transformers (words, scores summed in f64); the normalization is SentencePiece's own.
std::unique_ptr<SubwordModel> make_t5_unigram(const SentencePieceModel& model, int64_t num_extra_ids,
                                              const std::string& source);

// WordPiece as BERT uses it (Devlin et al. 2019; Wu et al. 2016): vocab.txt, greedy longest match.
struct WordPieceOptions {
  bool lower_case = true;
  bool strip_accents = true;
  bool separate_ideographs = true;
  std::string unknown = "[UNK]";
};

// `vocabulary`: a token per line, ids by line. Throws Error when the file or the unknown token is missing.
std::unique_ptr<SubwordModel> load_wordpiece(const std::filesystem::path& vocabulary,
                                             const WordPieceOptions& options);

// Tokens and their ids.
class Vocabulary {
 public:
  // Adds a token. A token of the vocabulary gets the new id.
  void set(std::string token, int64_t id) { ids_.insert_or_assign(std::move(token), id); }
  std::optional<int64_t> find(std::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> ids_;
};

}  // namespace kiln::text
