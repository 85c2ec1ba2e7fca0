// Dropout of what adapters read, while they are trained.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/model.h"

namespace kiln {

// Which samples a pass is of: the draws are keyed by the seed, the layer, the sample's position in the stream
// and the element, so that neither micro-batches nor ranks nor recomputation change them.
struct DropoutDraws {
  uint64_t seed = 0;
  int64_t first_position = 0;  // of the pass's samples, which follow each other
  int64_t num_samples = 0;
  at::Tensor text_offsets{};  // (B + 1), where rows are those of captions; undefined: there are none
};

// Passes on this thread drop elements while this lives. Without one, nothing is dropped.
class DropoutScope {
 public:
  explicit DropoutScope(const DropoutDraws& draws);
  ~DropoutScope();
  DropoutScope(const DropoutScope&) = delete;

 private:
  const DropoutDraws* before_;
};

// `x` with elements zeroed by the adapter's probability and the others divided by what is left of 1. x (B,
// .., C), captions' rows (T or more, C) or features (B, C, H, W). The same bits on every device.
at::Tensor with_dropout(const at::Tensor& x, const Adapter& adapter);

}  // namespace kiln
