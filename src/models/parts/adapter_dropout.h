// Dropout of the inputs of adapters in training.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/model.h"

namespace kiln {

// Identifies the samples of a pass. The draws are keyed by the seed, the layer, the sample's position in the
// stream and the element, so that micro-batches, ranks and recomputation do not change them.
struct DropoutDraws {
  uint64_t seed = 0;
  int64_t first_position = 0;  // of the first sample; the others follow it in the stream
  int64_t num_samples = 0;
  at::Tensor text_offsets{};  // (B + 1) of the captions' rows; undefined: no captions
};

// While this lives, passes on this thread drop elements. Without it nothing is dropped.
class DropoutScope {
 public:
  explicit DropoutScope(const DropoutDraws& draws);
  ~DropoutScope();
  DropoutScope(const DropoutScope&) = delete;

 private:
  const DropoutDraws* before_;
};

// Zeroes elements of `x` with the adapter's probability p and divides the others by 1 - p. x is (B, .., C),
// rows of captions (T or more, C), or features (B, C, H, W). Gives the same bits on every device.
at::Tensor with_dropout(const at::Tensor& x, const Adapter& adapter);

}  // namespace kiln
