// 3x3 convolutions of channels-last pictures without groups as products that gather their patches,
// torch-free. Elements are f32, or with AVX-512 bf16 in even numbers of channels. Each function does a piece
// of the work, so that the caller chooses the threads; no bit depends on how it is shared out.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace kiln::ops::cpu {

inline constexpr int64_t kTaps = 9;  // weights of a kernel, row by row

struct Conv3x3 {
  Dtype dtype;
  int64_t batch, height, width, in_channels, out_height, out_width, out_channels, stride, padding;
};

// Which pixels of the values the taps (0 to 8) of a pixel of the result meet.
class Sources {
 public:
  Sources(const Conv3x3& conv, bool is_grad_x)
      : width_(is_grad_x ? conv.out_width : conv.width),
        height_(is_grad_x ? conv.out_height : conv.height),
        result_width_(is_grad_x ? conv.width : conv.out_width),
        result_height_(is_grad_x ? conv.height : conv.out_height),
        batch_(conv.batch),
        stride_(is_grad_x ? 1 : conv.stride),
        first_(is_grad_x ? conv.padding : -conv.padding),
        step_(is_grad_x ? -1 : 1) {}

  // Writes those of one pixel, `spacing` elements apart: -1 for a tap that is outside of the picture.
  void write(int64_t pixel, int32_t* out, int64_t spacing) const {
    const int64_t column = pixel % result_width_ * stride_ + first_, row_of_all = pixel / result_width_,
                  row = row_of_all % result_height_ * stride_ + first_, sample = row_of_all / result_height_;
    for (int64_t tap = 0; tap < kTaps; ++tap) {
      const int64_t y = row + step_ * (tap / 3), x = column + step_ * (tap % 3);
      const bool is_inside = sample < batch_ && y >= 0 && y < height_ && x >= 0 && x < width_;
      out[tap * spacing] = is_inside ? static_cast<int32_t>((sample * height_ + y) * width_ + x) : -1;
    }
  }

 private:
  int64_t width_, height_, result_width_, result_height_, batch_, stride_, first_, step_;
};

// The result, or the gradient of the input (with a stride of 1), as the product of the weight as it lies in
// memory and the patches of all pixels: the values under the kernel, a column for each pixel. Its time is
// that of its multiplications even where a picture has fewer pixels than the weight has columns.
struct PatchProduct {
  Conv3x3 conv;
  bool is_grad_x;
  const void* values = nullptr;  // (batch, height, width, in_channels), or the result's gradient in its sizes
  const void* weight = nullptr;  // (out_channels, in_channels, 3, 3)
  const void* bias = nullptr;    // (out_channels), or none
  void* result = nullptr;        // channels-last

  int64_t channels() const { return is_grad_x ? conv.out_channels : conv.in_channels; }  // of the values
  int64_t rows() const { return is_grad_x ? conv.in_channels : conv.out_channels; }
  int64_t pixels() const {  // of the result
    return conv.batch * (is_grad_x ? conv.height * conv.width : conv.out_height * conv.out_width);
  }
};

// Patches lie in vectors of 16 pixels, and are packed in pieces of one vector and so many channels (pairs of
// them in bf16).
inline constexpr int64_t kPatchVector = 16, kPatchChannels = 64;
inline int64_t num_vectors(const PatchProduct& product) {
  return (product.pixels() + kPatchVector - 1) / kPatchVector;
}
inline int64_t patch_units(const PatchProduct& product) {  // of 32 bits, for each tap
  return product.channels() / (product.conv.dtype == Dtype::kF32 ? 1 : 2);
}
inline int64_t patches_bytes(const PatchProduct& product) {  // 64-byte aligned
  return 4 * kPatchVector * num_vectors(product) * kTaps * patch_units(product);
}
inline int64_t num_patch_pieces(const PatchProduct& product) {
  return num_vectors(product) * ((patch_units(product) + kPatchChannels - 1) / kPatchChannels);
}

inline constexpr int64_t kPatchRows = 48, kPatchPixels = 256;  // of the result that are computed at once

// Two sets of kernels: for AVX-512, and in f32 for vectors of any width. pack_patches() writes a piece of the
// patches, multiply_patches() computes rows [row, row + kPatchRows) at pixels [pixel, pixel + kPatchPixels),
// where there are as many.
void avx512_pack_patches(const PatchProduct& product, int64_t piece, void* patches);
void avx512_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel);
void vector_pack_patches(const PatchProduct& product, int64_t piece, void* patches);
void vector_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel);

// With AVX-512 the gradient of the weight is the product of the result's gradient and the patches, over all
// pixels.
struct WeightGradient {
  Conv3x3 conv;
  const void* x = nullptr;     // (batch, height, width, in_channels)
  const void* grad = nullptr;  // (batch, out_height, out_width, out_channels)
  void* result = nullptr;      // (out_channels, in_channels, 3, 3)

  int64_t pixels() const { return conv.batch * conv.out_height * conv.out_width; }
};

// The gradients as they are multiplied, and which pixels of x meet each of them.
int64_t packed_grad_bytes(const WeightGradient& product);  // 64-byte aligned
inline constexpr int64_t kGradPixels = 64;                 // of a piece
void pack_grad(const WeightGradient& product, int64_t first_pixel, void* packed);

inline constexpr int64_t kGradRows = 32;
inline constexpr int64_t kGradChannels = 16;  // of the input, whose gradients are computed at once
// Scratch of one call in bytes, 64-byte aligned.
int64_t weight_gradient_scratch(const WeightGradient& product);
// Computes the gradients of the weights between input channels [in, in + kGradChannels) and output channels
// [out, out + num_out). `out` is a multiple of kGradRows.
void multiply_grad(const WeightGradient& product, const void* packed, int64_t in, int64_t out,
                   int64_t num_out, void* scratch);

// What avx512_multiply_patches() and multiply_grad() do in bf16 by matrix tiles (AMX), which take 16 rows and
// pairs of 16 channels: all numbers of channels are divisible by 32.
inline constexpr int64_t kTileChannels = 32;
void tiles_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel);
void tiles_multiply_grad(const WeightGradient& product, const void* packed, int64_t in, int64_t out,
                         int64_t num_out, void* scratch);

}  // namespace kiln::ops::cpu
