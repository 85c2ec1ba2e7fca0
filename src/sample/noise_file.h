// The noise of pictures in a safetensors file, for comparisons with other programs: "noise" (N, C, H, W) f32,
// where each picture starts, and for samplers that add noise "step_noise" (steps, N, C, H, W) f32.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "sample/sampler_loop.h"

namespace kiln {

struct GivenNoise {
  at::Tensor start{};  // "noise"
  at::Tensor steps{};  // "step_noise"; undefined: the file has none
};

// Reads a file of noise for `num_images` pictures with latents (C, H, W) of `image_shape`. Throws Error
// naming
// --noise: another shape, too few pictures.
GivenNoise read_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape);

// Writes the noise that sample_images() draws for pictures 0 to num_images - 1. Atomic. Throws Error.
void write_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape,
                 const SampleOptions& options);

}  // namespace kiln
