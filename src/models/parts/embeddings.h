// Parameter-free embeddings and patch layouts that transformer denoisers share.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::nn {

// Sinusoidal embedding of timesteps (B) -> (B, width) f32 as [cos | sin]. Frequencies are
// 10000^(-i / (width / 2)), computed in f32 as in the published models. `width` is even; timesteps may be
// fractional. diffusers' models may use [sin | cos], and a shift s: 10000^(-i / (width / 2 - s)).
at::Tensor timestep_embedding(const at::Tensor& timesteps, int64_t width, bool cos_first = true,
                              double frequency_shift = 0);

// Fixed 2-D position table (1, grid_h * grid_w, width) f32, tokens row-major. The first half of the width
// encodes the column, the second the row; each half is [sin | cos]. Computed in f64. `width` is a multiple
// of 4. (MAE, DiT)
at::Tensor sincos_position_table(int64_t width, int64_t grid_h, int64_t grid_w);

// The same for a grid of any size: each side spans coordinates up to base_size / interpolation (PixArt-alpha,
// sec. 2.4; coordinates in f32 as in the published models). Computes sines once for each row and column, so
// that it is cheap enough for every forward pass.
at::Tensor scaled_position_table(int64_t width, int64_t grid_h, int64_t grid_w, int64_t base_size,
                                 double interpolation, at::Device device);

// (B, C, H, W) -> (B, N, C * p * p), tokens row-major, each in the order of a convolution weight (C, p, p).
at::Tensor patchify(const at::Tensor& x, int64_t patch_size);

// (B, N, p * p * C), C fastest -> (B, C, grid_h * p, grid_w * p) contiguous.
at::Tensor unpatchify(const at::Tensor& tokens, int64_t patch_size, int64_t grid_h, int64_t grid_w);

}  // namespace kiln::nn
