// Loops over latents with SIMD and run-time dispatch. Every function gives the same bits on every x86-64
// target. Sizes count elements, not bytes. The spans of one call have equal sizes. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace kiln {

// Converts stored latents (f32, bf16 or fp16, aligned to their element) to f32. Exact.
void latents_to_f32(Dtype dtype, const std::byte* in, std::span<float> out);
// Converts f32 to stored latents, rounded to nearest even. NaN stays NaN.
void latents_from_f32(std::span<const float> in, Dtype dtype, std::byte* out);

// x = (mean + exp(0.5 * clamp(logvar, -30, 20)) * epsilon - shift_factor) * scaling_factor, in place of the
// mean. The clamp is that of diffusers' DiagonalGaussianDistribution.
void draw_posterior(std::span<float> mean_to_x, std::span<const float> logvar, std::span<const float> epsilon,
                    float shift_factor, float scaling_factor);
// x = (x - shift_factor) * scaling_factor.
void scale_latents(std::span<float> x, float shift_factor, float scaling_factor);

// Mirrors each row of `width` elements.
void mirror_rows(std::span<float> x, int64_t width);

// Returns the index of the first NaN or infinity, -1 if there is none.
int64_t find_nonfinite(std::span<const float> x);

}  // namespace kiln
