// Rounding of f32 values to bf16 that is right in the mean: small updates of a weight are not lost, however
// small.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops {

// What a rounding draws with. The draw of a value depends on these and on its position alone: neither threads
// nor how a unit is divided change it.
struct RoundingDraw {
  uint64_t seed = 0;
  int64_t unit = 0;    // which of the model's flat units; below 2^24
  int64_t update = 1;  // 1-based count; below 2^40
  int64_t first = 0;   // position in the unit of the first value; below 2^35
};

// Rounds flat f32 `values` to bf16 `rounded`, of as many elements on the same device: to the next bf16 away
// from zero with a probability of the share of the way to it, else towards zero. What is bf16 already stays
// as it is, infinities and NaN too.
void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw);

namespace reference {
void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw);
}

}  // namespace kiln::ops
