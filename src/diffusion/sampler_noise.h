// The noise of pictures: what they start from, and what a sampler adds at its steps.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace kiln {

// The tensors of a file of noise, which kiln sample --noise reads: (N, C, H, W), and (steps, N, C, H, W).
inline constexpr const char *kNoiseTensor = "noise", *kStepNoiseTensor = "step_noise";

// Fill `noise` (B, C, H, W) f32 on the CPU with N(0, 1) by (seed, images[b]): the start, and the noise of a
// sampler's step.
void fill_start_noise(uint64_t seed, const std::vector<int64_t>& images, const at::Tensor& noise);
void fill_step_noise(uint64_t seed, const std::vector<int64_t>& images, int64_t step,
                     const at::Tensor& noise);

}  // namespace kiln
