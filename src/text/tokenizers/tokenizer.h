// Text to token ids, as transformers' tokenizers of the same files give them. Torch-free; const calls may run
// in several threads.
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

// What a kind of tokenizer puts around a text, or between the two of a pair.
struct SpecialFrame {
  TokenIds before{}, between{}, after{};
};

struct TokenizeOptions {
  std::optional<int64_t> max_length{};  // ids at most, special ones included; the text's end is cut, of a
                                        // pair the longer one's first
  bool add_special_tokens = true;
};

class Tokenizer {
 public:
  // Throws Error where the text is no UTF-8, or max_length does not hold the special tokens.
  TokenIds encode(std::string_view text, const TokenizeOptions& options = {}) const;
  TokenIds encode(std::string_view text, std::string_view pair, const TokenizeOptions& options = {}) const;

  const std::string& kind() const { return kind_; }  // "wordpiece" | "clip" | "t5" | "gemma"
  int64_t pad_id() const { return pad_id_; }
  bool pads_left() const { return pads_left_; }
  int64_t vocabulary_size() const { return tokens_->vocabulary_size(); }  // with added tokens
  std::optional<int64_t> id_of(std::string_view token) const { return tokens_->id_of(token); }
  // What the published model was made for (model_max_length), if its files tell.
  std::optional<int64_t> max_length() const { return max_length_; }
  // "xxh3:..." of all that decides about the ids.
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
// tokenizer.model (Gemma), with tokenizer_config.json, special_tokens_map.json and added_tokens.json where
// there are such. Of a whole pipeline its folder tokenizer/. Throws Error naming what is missing or broken.
std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);

}  // namespace kiln::text
