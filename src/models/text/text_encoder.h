// Text encoders: token ids to features, without work on padding. A new one is one file pair here and one row
// of the registry (text_registry.cpp).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/model.h"

namespace kiln {

// What the users of a text encoder must know without knowing which it is.
struct TextEncoderShape {
  std::string family;           // its name in the registry
  int64_t width = 0;            // D of the features
  int64_t vocabulary_size = 0;  // ids lie in [0, vocabulary_size)
  int64_t max_tokens = 0;       // that it has positions for; 0: any number
  // Whoever uses the features attends to padded positions as well: texts are padded to max_tokens (CLIP).
  bool users_see_padding = false;
  at::ScalarType storage_dtype = at::kHalf;  // that keeps the features best in two bytes
  // Index of the segment that leaves the last layer but one's features; -1: not a use of this encoder.
  int64_t penultimate_segment = -1;
};

// Features of texts, rows one after another as in TokenRows. Undefined: the encoder has no such output.
struct TextFeatures {
  at::Tensor last_hidden{};  // (T, D), after the final norm where there is one
  at::Tensor penultimate{};  // (T, D), of the last layer but one, without that norm
  at::Tensor pooled{};       // (B, D), one vector of each text
};

// Tokens that texts begin with, as an encoder keeps them whose tokens see none that come later: they are the
// same in every such text and are computed once.
struct TokenPrefix {
  struct Keys {
    at::Tensor keys{}, values{};  // (p, H, d) in the compute dtype, rotated to their positions
  };
  std::vector<int64_t> ids{};
  std::vector<Keys> segments{};  // of each; undefined where a segment has no attention
  at::Tensor last_hidden{};      // (p, D) f32; undefined: the prefix was not computed yet
};

// Texts of one forward pass and what they have to do with a prefix.
struct TextBatch {
  TokenRows tokens{};                  // without those of `after`
  const TokenPrefix* after = nullptr;  // that all the texts go on after
  TokenPrefix* fills = nullptr;        // whose ids the one text is: its keys and values are kept there
};

// forward(): last_hidden (T, D) f32.
class TextEncoder : public SegmentModel {
 public:
  const TextEncoderShape& shape() const { return shape_; }
  // Row i is what the first segment makes of id i. Held by that segment.
  const std::shared_ptr<Parameter>& token_table() const { return token_table_; }
  // What segment i makes of a batch. REQUIRES: no prefix in it where prefix_bytes() is 0.
  virtual State forward_segment(size_t i, const State& state, const TextBatch& batch) const {
    return segments_[i]->forward(state, {.tokens = batch.tokens});
  }
  // Last features (T, D) f32 of a batch's tokens. Throws Error as check() does.
  at::Tensor encode_batch(const TextBatch& batch) const;
  // Bytes of keys and values that a prefix of so many tokens keeps. 0: tokens see those that come later too.
  virtual int64_t prefix_bytes(int64_t num_tokens) const { return 0; }
  // Throws Error as check() does.
  TextFeatures encode(const TokenRows& tokens) const;
  // Throws Error for ids outside of the vocabulary, for a text without tokens or with too many.
  void check(const TokenRows& tokens) const;
  // One vector of each text, from what forward() gives; undefined where the encoder has none.
  virtual at::Tensor pool(const at::Tensor& last_hidden, const TokenRows& tokens) const { return {}; }

 protected:
  TextEncoderShape shape_;
  std::shared_ptr<Parameter> token_table_;
};

// ids (B, L) and mask (B, L), 1 = token: as rows. `keeps_padding`: padded positions stay, as rows that nobody
// attends to; otherwise they are left out. An undefined mask: every position is a token.
TokenRows token_rows_of(const at::Tensor& ids, const at::Tensor& mask, bool keeps_padding);

}  // namespace kiln
