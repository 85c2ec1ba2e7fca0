// Text encoders: token ids to features, without work on padding. A new one is one file pair here and one row
// of the registry (text_registry.cpp).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

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

// forward(): last_hidden (T, D) f32.
class TextEncoder : public SegmentModel {
 public:
  const TextEncoderShape& shape() const { return shape_; }
  // Row i is what the first segment makes of id i. Held by that segment.
  const std::shared_ptr<Parameter>& token_table() const { return token_table_; }
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
