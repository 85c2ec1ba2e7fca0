// Prepares 8-bit pictures for the feature networks.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace kiln {

// Throws Error unless pictures are (B, 3, H, W) u8 with B, H and W of at least 1.
void check_pictures(std::string_view who, const at::Tensor& pictures);

// Resizes values (B, C, H, W) f32 to (B, C, side, side), bilinear as in TensorFlow 1 without align_corners:
// output i lies at i * H / side, without a half-pixel shift.
at::Tensor resize_like_tensorflow1(const at::Tensor& values, int64_t side);

// Resizes values (B, C, H, W) f32 of 8-bit pictures to (B, C, side, side), bicubic with antialias as in
// Pillow (a = -0.5). The results are whole numbers of 0..255, rounded after each of the two passes.
at::Tensor resize_like_pillow(const at::Tensor& values, int64_t side);

}  // namespace kiln
