// Stochastic rounding of f32 values to bf16. It is right in the mean, so that small updates of a weight are
// not lost, however small.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops {

// The key of a rounding's draws. The draw of a value depends on the key and on the value's position alone:
// neither the threads nor the division of a unit change it.
struct RoundingDraw {
  uint64_t seed = 0;
  int64_t unit = 0;    // index of the model's flat unit; below 2^24
  int64_t update = 1;  // 1-based count; below 2^40
  int64_t first = 0;   // position in the unit of the first value; below 2^35
};

// Rounds flat f32 `values` to bf16 `rounded`, of equal length on the same device. A value goes to the next
// bf16 away from zero with the probability of its share of the way there, else towards zero. Values that are
// already bf16 stay as they are, and so do infinities and NaN.
void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw);

namespace reference {
void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw);
}

}  // namespace kiln::ops
