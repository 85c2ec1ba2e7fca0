// Texts to features: a tokenizer and a text encoder, as they lie in one folder.
#pragma once
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/conditioning.h"
#include "models/text/text_registry.h"
#include "text/tokenizers/tokenizer.h"

namespace kiln {

class CaptionEncoder {
 public:
  // `folder`: of an encoder with its tokenizer, or of a pipeline with both. `max_tokens`: longer texts are
  // cut; 0: what the encoder is used with. Throws Error: a file is missing, or the two do not belong
  // together.
  CaptionEncoder(const std::string& folder, int64_t max_tokens, at::Device device,
                 at::ScalarType compute_dtype);

  const TextEncoderShape& shape() const { return loaded_.encoder->shape(); }
  int64_t max_tokens() const { return max_tokens_; }
  void limit_tokens(int64_t most) { max_tokens_ = std::min(max_tokens_, most); }
  const std::string& encoder_fingerprint() const { return loaded_.fingerprint; }
  std::string tokenizer_fingerprint() const { return tokenizer_->fingerprint(); }

  struct Encoded {
    std::vector<at::Tensor> rows;  // of each text (rows, D) f32 on the CPU, one row a token; with
                                   // shape().users_see_padding always max_tokens
    int64_t num_truncated = 0;     // texts that were longer than max_tokens
  };
  // `batch` texts at once, those of similar length together: a text's features may differ in their last bits
  // with what it is encoded beside. In inference mode.
  Encoded encode(std::span<const std::string> texts, int64_t batch) const;

 private:
  text::TokenIds tokens_of(const std::string& text, int64_t& num_truncated) const;

  std::unique_ptr<text::Tokenizer> tokenizer_;
  LoadedTextEncoder loaded_;
  int64_t max_tokens_ = 0;
};

// The rows of several texts as one, in `dtype`.
TextRows joined_rows(const std::vector<at::Tensor>& rows, at::ScalarType dtype);

}  // namespace kiln
