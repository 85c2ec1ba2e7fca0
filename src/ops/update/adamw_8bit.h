// AdamW with moments of 8 bits (Dettmers et al. 2022), in bitsandbytes' layout: a value is a place in a table
// of 256, times the largest magnitude in its block of 256 elements.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/ops.h"

namespace kiln::ops {

inline constexpr int64_t kBlockOf8Bits = 256;  // elements that share a scale

// The 256 values of bitsandbytes' dynamic map, ascending: from -1 to 1, or from 0 to 1. (256) f32
at::Tensor dynamic_map(bool is_signed);

struct Moment8bit {
  at::Tensor places;  // (n) u8: in the dynamic map
  at::Tensor scales;  // (ceil(n / 256)) f32
};

// One step of the n elements of a tensor, or of a part of it that begins with a block. weights (n): f32;
// grads (n): f32, bf16 or fp16; mean: in the signed map; square: in the unsigned one; compute (n): bf16 or
// fp16, which the weights are rounded to, or undefined. A new moment becomes the nearest place, between two
// the lower one. On a CPU this is one pass; elsewhere it is composed of ATen's operations.
void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options);

namespace reference {
void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options);
}

}  // namespace kiln::ops
