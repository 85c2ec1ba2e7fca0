// What the 3x3 convolutions of AVX-512 and of matrix tiles share: which pixels meet, how patches lie, and how
// results are written. As with every such header, nothing from a shared one may be instantiated after this
// include.
#pragma once
#include "ops/cpu/pictures/convolution_kernel.h"  // for every processor, so before the next

#include "ops/cpu/avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kGradUnits = 128;  // of pixels that are summed at once
constexpr int64_t kColumns = kTaps * kGradChannels;
constexpr int64_t kSlack = 16;  // elements behind interleaved taps that are written as well

// Units of the contraction over so many channels.
template <class E>
KILN_INLINE int64_t units_of(int64_t channels) {
  return kTaps * channels / E::kPerUnit;
}

// The vectors of 16 pixels lie in panels of up to four, one panel behind the other.
struct Panel {
  int64_t first, vectors;
};
KILN_INLINE Panel panel_of(int64_t vector, int64_t vectors) {
  const int64_t first = vector / kTileVectors * kTileVectors;
  return {first, smaller(kTileVectors, vectors - first)};
}

// Writes sums (rows, columns) as pixels of the result, with the bias.
template <class E>
void write_pixels(const PatchProduct& product, const float* sums, int64_t columns, int64_t row, int64_t rows,
                  int64_t pixel) {
  using Scalar = typename E::Scalar;
  const auto* bias = static_cast<const Scalar*>(product.bias);
  auto* result = static_cast<Scalar*>(product.result);
  for (int64_t r = 0; r < rows; r += 16) {
    const __mmask16 lanes = first_lanes(rows - r);
    const __m512 added = bias ? load_floats(bias + row + r, lanes) : _mm512_setzero_ps();
    for (int64_t c = 0; c < columns; c += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = r + i < rows ? _mm512_load_si512(sums + (r + i) * columns + c) : _mm512_setzero_si512();
      transpose_16x16(block);
      for (int64_t i = 0; i < smaller(16, product.pixels() - pixel - c); ++i)
        store_floats(result + (pixel + c + i) * product.rows() + row + r, lanes,
                     _mm512_add_ps(_mm512_castsi512_ps(block[i]), added));
    }
  }
}

// Units along the pixels, in whole tiles: beyond the last pixel they are 0.
template <class E>
KILN_INLINE int64_t grad_units(const WeightGradient& product) {
  return round_up((product.pixels() + E::kPerUnit - 1) / E::kPerUnit, 16);
}

// What pack_grad() writes: the gradient of each output channel as a row of units along the pixels, and the
// sources of all taps of every pixel.
template <class E>
struct PackedGrad {
  int64_t stride;  // from one row to the next: an odd number of cache lines, so that rows do not collide
  uint32_t* rows;
  int32_t* sources;
  Scratch scratch;
  PackedGrad(const WeightGradient& product, void* packed) : scratch{static_cast<char*>(packed)} {
    const int64_t units = grad_units<E>(product);
    stride = (units / 16 | 1) * 16;
    rows = scratch.take<uint32_t>(round_up(product.conv.out_channels, 16) * stride);
    sources = scratch.take<int32_t>(units * E::kPerUnit * kTaps);
  }
};

// Loads 16 channels of a pixel, or of a pair of bf16 pixels as units. Pixels of which `at` is negative are 0.
KILN_INLINE __m512i load_pixels(F32, const float* values, int64_t channels, const int32_t* at, int64_t,
                                __mmask16 lanes) {
  return _mm512_castps_si512(
      _mm512_maskz_loadu_ps(*at < 0 ? 0 : lanes, values + (*at < 0 ? 0 : *at) * channels));
}
KILN_INLINE __m512i load_pixels(BF16, const uint16_t* values, int64_t channels, const int32_t* at,
                                int64_t spacing, __mmask16 lanes) {
  const auto load = [&](int64_t pixel) KILN_LAMBDA {
    return _mm512_cvtepu16_epi32(
        _mm256_maskz_loadu_epi16(pixel < 0 ? 0 : lanes, values + (pixel < 0 ? 0 : pixel) * channels));
  };
  return _mm512_or_si512(load(at[0]), _mm512_slli_epi32(load(at[spacing]), 16));
}

// Writes nine vectors of 16 channels, one for each tap, as 16 channels of nine taps, and kSlack / 2 elements
// more.
KILN_INLINE void interleave_taps(const __m512i* taps, uint32_t* out) {
  __m512i block[16];
  for (int64_t t = 0; t < 16; ++t) block[t] = t < kTaps ? taps[t] : _mm512_setzero_si512();
  transpose_16x16(block);
  for (int64_t c = 0; c < 16; ++c) _mm512_storeu_si512(out + c * kTaps, block[c]);
}

template <class E>
struct GradientScratch {
  uint32_t* patches;
  float* sums;
  Scratch scratch;
  GradientScratch(const WeightGradient& product, void* memory) : scratch{static_cast<char*>(memory)} {
    patches = scratch.take<uint32_t>(kGradUnits * kColumns + kSlack);
    sums = scratch.take<float>(round_up(product.conv.out_channels, 16) * kColumns);
  }
};

// Writes `count` units of patches from `first` on, (units, kColumns): kGradChannels channels from `in` on, in
// the order of the weight if `is_ordered`, else tap by tap.
template <class E>
KILN_INLINE void write_patches(const WeightGradient& product, const int32_t* sources, int64_t in,
                               int64_t first, int64_t count, bool is_ordered, uint32_t* patches) {
  const int64_t channels = product.conv.in_channels;
  const __mmask16 lanes = first_lanes(channels - in);
  const auto* x = static_cast<const typename E::Scalar*>(product.x) + in;
  for (int64_t u = 0; u < count; ++u, patches += kColumns) {
    const int32_t* at = sources + (first + u) * E::kPerUnit * kTaps;
    __m512i taps[kTaps];
    for (int64_t t = 0; t < kTaps; ++t) taps[t] = load_pixels(E(), x, channels, at + t, kTaps, lanes);
    if (is_ordered)
      interleave_taps(taps, patches);
    else
      for (int64_t t = 0; t < kTaps; ++t) _mm512_store_si512(patches + t * 16, taps[t]);
  }
}

// Writes sums (num_out, kColumns) of taps that are not in the order of the weight to their place in it.
template <class E>
KILN_INLINE void write_weight(const WeightGradient& product, const float* sums, int64_t in, int64_t out,
                              int64_t num_out, bool is_ordered) {
  const int64_t channels = product.conv.in_channels, columns = kTaps * smaller(kGradChannels, channels - in);
  for (int64_t o = 0; o < num_out; ++o, sums += kColumns) {
    alignas(64) uint32_t row[kColumns + kSlack];
    __m512i taps[kTaps];
    for (int64_t t = 0; t < kTaps; ++t) taps[t] = _mm512_load_si512(sums + t * 16);
    if (!is_ordered) interleave_taps(taps, row);
    const void* from = is_ordered ? static_cast<const void*>(sums) : row;
    auto* to = static_cast<typename E::Scalar*>(product.result) + ((out + o) * channels + in) * kTaps;
    for (int64_t c = 0; c < columns; c += 16)
      store_floats(to + c, first_lanes(columns - c), _mm512_load_ps(static_cast<const float*>(from) + c));
  }
}

}  // namespace
}  // namespace kiln::ops::cpu
