// Text encoders turn token ids into features, without work on padding. A new one is one source here, its
// declaration in encoders.h and one row of the registry (text_registry.cpp).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/model.h"

namespace kiln {

// The facts of a text encoder that its users need, whichever encoder it is.
struct TextEncoderShape {
  std::string family;           // its name in the registry
  int64_t width = 0;            // D of the features
  int64_t vocabulary_size = 0;  // ids lie in [0, vocabulary_size)
  int64_t max_tokens = 0;       // the most that it has positions for; 0: any number
  // True if texts are padded to max_tokens because the users of the features also attend to padding (CLIP).
  bool users_see_padding = false;
  at::ScalarType storage_dtype = at::kHalf;  // keeps the features best in two bytes
  // Index of the segment whose output is the features of the last layer but one; -1: not used of this
  // encoder.
  int64_t penultimate_segment = -1;
};

// Features of texts, with rows one after another as in TokenRows. An output that the encoder lacks is
// undefined.
struct TextFeatures {
  at::Tensor last_hidden{};  // (T, D), after the final norm where there is one
  at::Tensor penultimate{};  // (T, D), of the last layer but one, without the final norm
  at::Tensor pooled{};       // (B, D), one vector for each text
};

// Tokens that several texts begin with. An encoder whose tokens see no later ones computes them once, because
// they are the same in every such text.
struct TokenPrefix {
  struct Keys {
    at::Tensor keys{}, values{};  // (p, H, d) in the compute dtype, rotated to their positions
  };
  std::vector<int64_t> ids{};
  std::vector<Keys> segments{};  // one per segment; undefined where that has no attention
  at::Tensor last_hidden{};      // (p, D) f32; undefined until the prefix is computed
};

// The texts of one forward pass, and how they use a prefix.
struct TextBatch {
  TokenRows tokens{};                  // without the tokens of `after`
  const TokenPrefix* after = nullptr;  // if set, all the texts continue this prefix
  TokenPrefix* fills = nullptr;  // if set, the only text is this prefix; its keys and values are kept there
};

// A model whose forward() returns last_hidden (T, D) f32.
class TextEncoder : public SegmentModel {
 public:
  const TextEncoderShape& shape() const { return shape_; }
  // The table whose row i the first segment takes for id i. It belongs to that segment.
  const std::shared_ptr<Parameter>& token_table() const { return token_table_; }
  // Runs segment i on a batch. REQUIRES: the batch has no prefix if prefix_bytes() is 0.
  virtual State forward_segment(size_t i, const State& state, const TextBatch& batch) const {
    return segments_[i]->forward(state, {.tokens = batch.tokens});
  }
  // Returns the last features (T, D) f32 of a batch's tokens. Throws Error as check() does.
  at::Tensor encode_batch(const TextBatch& batch) const;
  // Returns the bytes that a prefix of so many tokens keeps. 0: prefixes cannot be kept, because tokens also
  // see later ones.
  virtual int64_t prefix_bytes(int64_t num_tokens) const { return 0; }
  // Returns all features of the texts. Throws Error as check() does.
  TextFeatures encode(const TokenRows& tokens) const;
  // Throws Error for ids outside of the vocabulary and for a text without tokens or with too many.
  void check(const TokenRows& tokens) const;
  // Returns one vector for each text from the result of forward(), or undefined if the encoder has none.
  virtual at::Tensor pool(const at::Tensor& last_hidden, const TokenRows& tokens) const { return {}; }

 protected:
  // Adds what embeds ids, and config.depth blocks.
  template <class Block, class Embed, class Config>
  void add_segments(std::unique_ptr<Embed> embed, const Config& config, const BuildOptions& options) {
    token_table_ = embed->table();
    segments_.push_back(std::move(embed));
    for (int64_t i = 0; i < config.depth; ++i)
      segments_.push_back(std::make_unique<Block>(config, i, options));
  }

  TextEncoderShape shape_;
  std::shared_ptr<Parameter> token_table_;
};

// Memory that one batch takes in addition to the weights.
struct BatchMemory {
  int64_t state_bytes = 0;  // the most that stays between two segments
  int64_t peak_bytes = 0;   // the most while a segment computes, state included
};

// Counts the memory of a batch on `device` by a dry run. The encoder's weights are on meta in their final
// dtypes. `host_offsets`: as in TokenRows.
BatchMemory planned_batch(const TextEncoder& encoder, const std::vector<int64_t>& host_offsets,
                          at::Device device);
// The same for `batch` texts of `length` tokens each.
BatchMemory planned_batch(const TextEncoder& encoder, int64_t batch, int64_t length, at::Device device);

}  // namespace kiln
