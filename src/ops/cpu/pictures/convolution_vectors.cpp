// 3x3 convolutions by vectors of any width. The gradient of the weight is products over the pixels of a few
// rows, one for each tap of the kernel. The rows lie behind each other with what pads them, and the gradients
// of their results likewise, with zeros between the rows: all taps thus read the same pixels, from different
// places on. Every element is one sum in the order of the pixels, whatever the blocks.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/pictures/convolution_vectors.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/pictures/convolution_kernel.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/small_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kTileRows = tile_rows(kTileVectors);
constexpr size_t kPanelChannels = kTileVectors * kLanes;  // of the input, side by side in a panel of pixels
constexpr size_t kPanelFloats = kConvPixels * kPanelChannels;
static_assert(kConvInChannels % kPanelChannels == 0 && kConvOutChannels % kTileRows == 0);
constexpr size_t kMostColumns = 128;  // of a rectangle that is not as wide as the picture

// Results of one picture that are summed at once.
struct Rectangle {
  size_t sample, row, rows, column, columns;
  size_t line;  // pixels from one row to the next
  // From the first result to the last, what lies between the rows included.
  size_t num_results() const { return (rows - 1) * line + columns; }
};

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

// Gathers the pixels that a rectangle reads, as panels of `block`'s channels: two rows more than it has, each
// of `line` pixels, and the last pixel that they share with the row that would follow.
template <class T>
void gather_pixels(const ConvGradWeight& conv, const ConvBlock& block, const Rectangle& at, float* panels) {
  const T* x = static_cast<const T*>(conv.x);
  const size_t pixels = (at.rows + 2) * at.line + 1;
  for (size_t i = 0; i < pixels; ++i) {
    // Places above or left of the picture wrap around to the largest numbers.
    const size_t y = at.row + i / at.line - conv.padding, place = at.column + i % at.line - conv.padding;
    const bool is_inside = y < conv.height && place < conv.width;
    const size_t pixel = (at.sample * conv.height + y) * conv.width + place;
    copy_pixel(is_inside ? x + pixel * conv.in_channels + block.first_in : nullptr, block.num_in,
               panels + i * kPanelChannels);
  }
}

// Gathers the gradients of a rectangle's results as tiles of kTileRows channels, result by result.
template <class T>
void gather_grads(const ConvGradWeight& conv, const ConvBlock& block, const Rectangle& at, float* tiles) {
  HWY_ALIGN float channels[kConvOutChannels + kLanes] = {};
  const size_t results = at.num_results();
  for (size_t i = 0; i < results; ++i) {
    if (const size_t column = i % at.line; column < at.columns) {
      const size_t y = at.row + i / at.line, place = at.column + column;
      const T* from = static_cast<const T*>(conv.grad) + block.first_out +
                      ((at.sample * conv.out_height + y) * conv.out_width + place) * conv.out_channels;
      for_each_vector(block.num_out,
                      [&](size_t j, size_t lanes) HWY_ATTR { store(load(from + j, lanes), channels + j); });
    } else {
      std::fill_n(channels, kConvOutChannels, 0.0f);
    }
    for (size_t o = 0; o < block.num_out; o += kTileRows)
      std::memcpy(tiles + o * kConvResults + i * kTileRows, channels + o, kTileRows * sizeof(float));
  }
}

// Calls body(rectangle) for all results in their order.
template <class Body>
HWY_INLINE void for_rectangles(const ConvGradWeight& conv, const Body& body) {
  const size_t most = conv.out_width < kConvResults / 2 ? conv.out_width : kMostColumns;
  for (size_t sample = 0; sample < conv.batch; ++sample) {
    const bool is_whole = most == conv.out_width;
    // One column of zeros is right of a row and left of the next.
    const size_t line = most + (is_whole && conv.padding == 1 ? 1 : 2);
    const size_t rows_at_once = is_whole ? 1 + (kConvResults - most) / line : 1;
    for_even_pieces(conv.out_height, rows_at_once, [&](size_t row, size_t rows) {
      for_even_pieces(conv.out_width, most, [&](size_t column, size_t columns) {
        body(Rectangle{sample, row, rows, column, columns, is_whole ? line : columns + 2});
      });
    });
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
  bool is_first = true;
  for_rectangles(conv, [&](const Rectangle& at) HWY_ATTR {
    gather_grads<T>(conv, block, at, tiles);
    gather_pixels<T>(conv, block, at, panels);
    for (size_t c = 0; c < block.num_in; c += kPanelChannels)
      for (size_t tap = 0; tap < kConvTaps; ++tap)
        for (size_t o = 0; o < block.num_out; o += kTileRows)
          multiply(
              {tiles + o * kConvResults, /*row=*/1, /*inner=*/kTileRows},
              {panels + c * kConvPixels + (tap / 3 * at.line + tap % 3) * kPanelChannels, kPanelChannels},
              {sums + (o * kConvTaps + tap) * kConvInChannels + c, kConvTaps * kConvInChannels},
              std::min(kTileRows, block.num_out - o), kTileVectors, at.num_results(), /*add=*/!is_first);
    is_first = false;
  });
  write_sums(conv, block, sums, grad_weight);
}

void conv_grad_weight_block(const ConvGradWeight& conv, const ConvBlock& block, void* grad_weight,
                            float* scratch) {
  with_element(conv.dtype, [&](auto element) HWY_ATTR {
    sum_block(conv, block, static_cast<decltype(element)*>(grad_weight), scratch);
  });
}

// The result or the gradient of x, in f32: the weight as it lies times the patches, which lie (channels,
// taps, kPatchVector) for each vector of pixels.

constexpr size_t kPixels = kPatchVector, kSideBySide = 32;  // channels whose patches are transposed at once

void pack_patches(const PatchProduct& product, size_t piece, float* patches) {
  const size_t channels = product.channels(), vectors = num_vectors(product), vector = piece % vectors,
               begin = piece / vectors * kPatchChannels, end = std::min(channels, begin + kPatchChannels);
  float* const panel = patches + vector * kPixels * kTaps * channels;
  int32_t sources[kPixels][kTaps];
  const Sources sources_of(product.conv, product.is_grad_x);
  for (size_t i = 0; i < kPixels; ++i) sources_of.write(vector * kPixels + i, sources[i], /*spacing=*/1);
  for (size_t channel = begin; channel < end; channel += kSideBySide)
    for (size_t tap = 0; tap < kTaps; ++tap) {
      const size_t count = std::min(kSideBySide, end - channel);
      HWY_ALIGN float rows[kPixels * kSideBySide] = {};
      HWY_ALIGN float columns[kSideBySide * kPixels];
      for (size_t i = 0; i < kPixels; ++i)
        if (const int32_t source = sources[i][tap]; source >= 0)
          std::memcpy(rows + i * kSideBySide,
                      static_cast<const float*>(product.values) + source * channels + channel,
                      count * sizeof(float));
      transpose({rows, kSideBySide}, kPixels, kSideBySide, {columns, kPixels});
      for (size_t c = 0; c < count; ++c)
        std::memcpy(panel + ((channel + c) * kTaps + tap) * kPixels, columns + c * kPixels,
                    kPixels * sizeof(float));
    }
}

void multiply_patches(const PatchProduct& product, const float* patches, size_t row, size_t pixel) {
  constexpr size_t kRows = kPatchRows, kColumns = kPatchPixels, kAtOnce = 28;  // channels: a panel in a cache
  HWY_ALIGN float sums[kRows * kColumns];
  HWY_ALIGN float transposed[kColumns * kRows];
  const size_t channels = product.channels(), num_rows = product.rows(), pixels = product.pixels(),
               rows = std::min(kRows, num_rows - row), columns = std::min(kColumns, pixels - pixel);
  const float* weight = static_cast<const float*>(product.weight);
  for (size_t channel = 0; channel < channels; channel += kAtOnce) {
    const size_t count = std::min(kAtOnce, channels - channel);
    LeftMatrix left{weight + (row * channels + channel) * kTaps, channels * kTaps, 1};
    if (product.is_grad_x) {  // a row is an input channel, whose weights are apart for each output channel
      left = {transposed, kAtOnce * kTaps, 1};
      for (size_t r = 0; r < rows; ++r)
        for (size_t c = 0; c < count; ++c)
          std::memcpy(transposed + (r * kAtOnce + c) * kTaps,
                      weight + ((channel + c) * num_rows + row + r) * kTaps, kTaps * sizeof(float));
    }
    for (size_t column = 0; column < columns; column += kPixels)
      multiply(
          left,
          {const_cast<float*>(patches) + ((pixel + column) * channels + channel * kPixels) * kTaps, kPixels},
          {sums + column, kColumns}, rows, kPixels / kLanes, count * kTaps, /*add=*/channel > 0);
  }
  constexpr size_t kWhole = kLanes < 4 ? 4 : kLanes;
  transpose({sums, kColumns}, (rows + kWhole - 1) / kWhole * kWhole, (columns + 3) / 4 * 4,
            {transposed, kRows});
  const auto* bias = static_cast<const float*>(product.bias);
  for (size_t i = 0; i < columns; ++i) {
    const float* from = transposed + i * kRows;
    float* to = static_cast<float*>(product.result) + (pixel + i) * num_rows + row;
    for_each_vector(rows, [&](size_t j, size_t lanes) HWY_ATTR {
      const Vec sum = load(from + j);
      store(bias ? hn::Add(sum, load(bias + row + j, lanes)) : sum, to + j, lanes);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(conv_grad_weight_block);
HWY_EXPORT(pack_patches);
HWY_EXPORT(multiply_patches);

void conv_grad_weight(const ConvGradWeight& conv, const ConvBlock& block, void* grad_weight, float* scratch) {
  HWY_DYNAMIC_DISPATCH(conv_grad_weight_block)(conv, block, grad_weight, scratch);
}

void vector_pack_patches(const PatchProduct& product, int64_t piece, void* patches) {
  HWY_DYNAMIC_DISPATCH(pack_patches)(product, static_cast<size_t>(piece), static_cast<float*>(patches));
}

void vector_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel) {
  HWY_DYNAMIC_DISPATCH(multiply_patches)
  (product, static_cast<const float*>(patches), static_cast<size_t>(row), static_cast<size_t>(pixel));
}

}  // namespace kiln::ops::cpu
#endif
