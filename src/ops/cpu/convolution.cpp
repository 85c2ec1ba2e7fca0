// The gradient of a 3x3 convolution's weight, as a product over pixels. The patches of a few pixels are
// gathered at a time, tap by tap, so that patches never lie in memory as a whole. Every element is one sum in
// the order of the pixels, whatever the blocks.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/convolution.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/small_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kTileRows = tile_rows(kTileVectors);
constexpr size_t kPanelChannels = kTileVectors * kLanes;  // of the input, side by side in a panel of pixels
constexpr size_t kPanelFloats = kConvPixels * kPanelChannels;
static_assert(kConvInChannels % kPanelChannels == 0 && kConvOutChannels % kTileRows == 0);

// Copies the channels of a pixel into its row of each panel, and zeros behind them; all zeros if `from` is
// null.
template <class T>
HWY_INLINE void copy_pixel(const T* from, size_t channels, float* panels) {
  for (size_t c = 0; c < channels; c += kPanelChannels, panels += kPanelFloats)
    for (size_t j = 0; j < kPanelChannels; j += kLanes) {
      const bool has_values = from && c + j < channels;
      store(has_values ? load(from + c + j, std::min(kLanes, channels - c - j)) : set(0), panels + j);
    }
}

// Gathers what a tap of the kernel reads for the results [first, first + count), as panels of `block`'s
// channels.
template <class T>
void gather_tap(const ConvGradWeight& conv, const ConvBlock& block, size_t tap, size_t first, size_t count,
                float* panels) {
  const T* x = static_cast<const T*>(conv.x);
  for (size_t i = 0; i < count;) {
    const size_t line = (first + i) / conv.out_width, begin = (first + i) % conv.out_width,
                 end = std::min(conv.out_width, begin + count - i);
    // Places above or left of the picture wrap around to the largest numbers.
    const size_t y = line % conv.out_height * conv.stride + tap / 3 - conv.padding;
    const T* from = x + (line / conv.out_height * conv.height + y) * conv.width * conv.in_channels;
    for (size_t column = begin; column < end; ++column, ++i) {
      const size_t place = column * conv.stride + tap % 3 - conv.padding;
      const bool is_inside = y < conv.height && place < conv.width;
      copy_pixel(is_inside ? from + place * conv.in_channels + block.first_in : nullptr, block.num_in,
                 panels + i * kPanelChannels);
    }
  }
}

// Gathers the gradients of the results [first, first + count) as tiles of kTileRows channels, pixel by pixel.
template <class T>
void gather_grads(const ConvGradWeight& conv, const ConvBlock& block, size_t first, size_t count,
                  float* tiles) {
  const T* from = static_cast<const T*>(conv.grad) + first * conv.out_channels + block.first_out;
  HWY_ALIGN float channels[kConvOutChannels + kLanes] = {};
  for (size_t i = 0; i < count; ++i, from += conv.out_channels) {
    for_each_vector(block.num_out,
                    [&](size_t j, size_t lanes) HWY_ATTR { store(load(from + j, lanes), channels + j); });
    for (size_t o = 0; o < block.num_out; o += kTileRows)
      std::memcpy(tiles + o * kConvPixels + i * kTileRows, channels + o, kTileRows * sizeof(float));
  }
}

// Writes sums (num_out, taps, kConvInChannels) into their places of the gradient (out, in, 3, 3).
template <class T>
void write_sums(const ConvGradWeight& conv, const ConvBlock& block, const float* sums, T* grad_weight) {
  HWY_ALIGN float row[kConvInChannels * kConvTaps];
  for (size_t o = 0; o < block.num_out; ++o, sums += kConvTaps * kConvInChannels) {
    for (size_t c = 0; c < block.num_in; ++c)
      for (size_t tap = 0; tap < kConvTaps; ++tap) row[c * kConvTaps + tap] = sums[tap * kConvInChannels + c];
    T* to = grad_weight + ((block.first_out + o) * conv.in_channels + block.first_in) * kConvTaps;
    for_each_vector(block.num_in * kConvTaps,
                    [&](size_t j, size_t lanes) HWY_ATTR { store(load(row + j), to + j, lanes); });
  }
}

template <class T>
void sum_block(const ConvGradWeight& conv, const ConvBlock& block, T* grad_weight, float* scratch) {
  float *sums = scratch, *panels = sums + kConvOutChannels * kConvTaps * kConvInChannels,
        *tiles = panels + kConvPixels * kConvInChannels;
  const size_t num_pixels = conv.batch * conv.out_height * conv.out_width;
  for (size_t first = 0; first < num_pixels; first += kConvPixels) {
    const size_t count = std::min(kConvPixels, num_pixels - first);
    gather_grads<T>(conv, block, first, count, tiles);
    for (size_t tap = 0; tap < kConvTaps; ++tap) {
      gather_tap<T>(conv, block, tap, first, count, panels);
      for (size_t c = 0; c < block.num_in; c += kPanelChannels)
        for (size_t o = 0; o < block.num_out; o += kTileRows)
          multiply({tiles + o * kConvPixels, /*row=*/1, /*inner=*/kTileRows},
                   {panels + c * kConvPixels, kPanelChannels},
                   {sums + (o * kConvTaps + tap) * kConvInChannels + c, kConvTaps * kConvInChannels},
                   std::min(kTileRows, block.num_out - o), kTileVectors, count, /*add=*/first > 0);
    }
  }
  write_sums(conv, block, sums, grad_weight);
}

void conv_grad_weight_block(const ConvGradWeight& conv, const ConvBlock& block, void* grad_weight,
                            float* scratch) {
  with_element(conv.dtype, [&](auto element) HWY_ATTR {
    sum_block(conv, block, static_cast<decltype(element)*>(grad_weight), scratch);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(conv_grad_weight_block);

void conv_grad_weight(const ConvGradWeight& conv, const ConvBlock& block, void* grad_weight, float* scratch) {
  HWY_DYNAMIC_DISPATCH(conv_grad_weight_block)(conv, block, grad_weight, scratch);
}

}  // namespace kiln::ops::cpu
#endif
