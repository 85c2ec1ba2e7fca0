// The depthwise 3x3 convolution and gate of a GLUMBConv on one block of channels of one picture, in plain
// pointers.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace kiln::ops::cpu {

inline constexpr size_t kGluTaps = 9;            // of a 3x3 kernel, row-major
inline constexpr size_t kGluBlockChannels = 64;  // at most: three rows of them stay in the second-level cache

struct GluConv {
  const void* h;        // (height * width, 2 * channels)
  Dtype dtype;          // of h, the result and gradients
  const float* weight;  // (kGluTaps, 2 * channels)
  const float* bias;    // (2 * channels)
  size_t height, width, channels;
};

// Channels [first, first + count) of out (height * width, channels), count <= kGluBlockChannels.
void glu_conv(const GluConv& conv, void* out, size_t first, size_t count);

// The gradient of h and sums over the picture of those of weight and bias (laid out like these), for channels
// [first, first + count) and their gates.
void glu_conv_grad(const GluConv& conv, const void* grad, void* grad_h, float* grad_weight, float* grad_bias,
                   size_t first, size_t count);

}  // namespace kiln::ops::cpu
