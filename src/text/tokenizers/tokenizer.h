// Turns text into token ids, the same as transformers' tokenizers with the same files. Torch-free. Const
// calls may run in several threads.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "text/tokenizers/added_tokens.h"
#include "text/tokenizers/subword_model.h"

namespace kiln::text {

// The special tokens that a tokenizer puts around a text, or between the two texts of a pair.
struct SpecialFrame {
  TokenIds before{}, between{}, after{};
};

struct TokenizeOptions {
  // The most ids, special ones included. The end of a longer text is cut; of a pair, first the longer text.
  std::optional<int64_t> max_length{};
  bool add_special_tokens = true;
};

class Tokenizer {
 public:
  // Throws Error if the text is no UTF-8, or if max_length does not hold the special tokens.
  TokenIds encode(std::string_view text, const TokenizeOptions& options = {}) const;
  TokenIds encode(std::string_view text, std::string_view pair, const TokenizeOptions& options = {}) const;

  const std::string& kind() const { return kind_; }  // "wordpiece" | "clip" | "t5" | "gemma"
  int64_t pad_id() const { return pad_id_; }
  bool pads_left() const { return pads_left_; }
  int64_t vocabulary_size() const { return tokens_->vocabulary_size(); }  // with added tokens
  std::optional<int64_t> id_of(std::string_view token) const { return tokens_->id_of(token); }
  // The length that the published model was made for (model_max_length), if its files say.
  std::optional<int64_t> max_length() const { return max_length_; }
  // "xxh3:...", a hash of everything that decides the ids.
  const std::string& fingerprint() const { return fingerprint_; }

 private:
  friend std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);
  std::string kind_;
  std::unique_ptr<SubwordModel> model_;
  std::unique_ptr<AddedTokens> tokens_;
  SpecialFrame frame_;
  int64_t pad_id_ = 0;
  bool pads_left_ = false;
  std::optional<int64_t> max_length_;
  std::string fingerprint_;
};

// Reads the files as published: vocab.txt (WordPiece), vocab.json and merges.txt (CLIP), spiece.model (T5) or
// tokenizer.model (Gemma), with tokenizer_config.json, special_tokens_map.json, added_tokens.json and the
// added tokens of tokenizer.json if they exist. In the folder of a whole pipeline, reads its folder
// tokenizer/. Throws Error naming what is missing or broken.
std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);

}  // namespace kiln::text
