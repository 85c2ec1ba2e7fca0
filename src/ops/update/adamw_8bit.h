// AdamW with moments of 8 bits (Dettmers et al. 2022), in the layout of bitsandbytes: a value is a place in a
// table of 256, times the largest magnitude in its block of 256 elements.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/ops.h"

namespace kiln::ops {

inline constexpr int64_t kBlockOf8Bits = 256;  // elements that share a scale

// Returns the 256 values of bitsandbytes' dynamic map in ascending order, (256) f32: of [-1, 1] if signed,
// else of [0, 1].
at::Tensor dynamic_map(bool is_signed);

struct Moment8bit {
  at::Tensor places;  // (n) u8: places in the dynamic map
  at::Tensor scales;  // (ceil(n / 256)) f32
};

// Steps the n elements of a tensor, or of a part of it that begins with a block. weights (n) are f32; grads
// (n) f32, bf16 or fp16. `mean` is in the signed map, `square` in the unsigned one. `compute` (n) bf16 or
// fp16 receives the rounded weights; it may be undefined. A new moment becomes the nearest place, or the
// lower one of two equally near. On a CPU this is one pass; elsewhere it is composed of ATen's operations.
void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options);

namespace reference {
void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options);
}

}  // namespace kiln::ops
