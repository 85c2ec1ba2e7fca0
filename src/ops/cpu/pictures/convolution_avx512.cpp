#include "ops/cpu/instruction_set.h"
#include "ops/cpu/pictures/convolution_kernel.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/pictures/convolution_avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kPanelUnits = 256;  // of a contraction that are multiplied at once: they stay in the caches

// ---- patches ----

constexpr uint32_t kHighHalves = 0xaaaaaaaa;

// Returns units of the low, or high, halves of two vectors.
KILN_INLINE __m512i low_halves(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(kHighHalves, first, _mm512_slli_epi32(second, 16));
}
KILN_INLINE __m512i high_halves(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(kHighHalves, _mm512_srli_epi32(first, 16), second);
}

// Writes the nine units of one f32 channel or pair of bf16 channels, `spacing` apart, in the order in which
// the weight is read. taps[t * 16] is the channel's value, or the pair's, at tap t of 16 pixels.
template <class E, bool kGradX>
KILN_INLINE void write_units(const __m512i* taps, uint32_t* out, int64_t spacing) {
  const auto tap = [&](int t) KILN_LAMBDA { return taps[t * 16]; };
  const auto write = [&](int unit, __m512i values)
                         KILN_LAMBDA { _mm512_store_si512(out + unit * spacing, values); };
  if constexpr (E::kPerUnit == 1) {
    for (int t = 0; t < kTaps; ++t) write(t, tap(t));
  } else if constexpr (kGradX) {
    // Eight taps of the first channel, eight of the second, and the last of both.
    for (int t = 0; t < 8; t += 2) {
      write(t / 2, low_halves(tap(t), tap(t + 1)));
      write(4 + t / 2, high_halves(tap(t), tap(t + 1)));
    }
    write(8, tap(8));
  } else {
    // 18 weights that follow each other.
    for (int t = 0; t < 8; t += 2) {
      write(t / 2, low_halves(tap(t), tap(t + 1)));
      write(5 + t / 2, high_halves(tap(t + 1), tap(t + 2)));
    }
    write(4, _mm512_mask_blend_epi16(kHighHalves, tap(8), tap(0)));
  }
}

template <class E, bool kGradX>
void pack_piece(const PatchProduct& product, int64_t piece, uint32_t* patches) {
  const int64_t channels = product.channels(), channel_units = channels / E::kPerUnit,
                vectors = num_vectors(product), vector = piece % vectors,
                begin = piece / vectors * kPatchChannels,
                end = smaller(begin + kPatchChannels, channel_units);
  const Panel panel = panel_of(vector, vectors);
  const int64_t spacing = panel.vectors * 16;
  uint32_t* out = patches + panel.first * 16 * units_of<E>(channels) + (vector - panel.first) * 16;
  int32_t sources[kTaps][16];
  const Sources sources_of(product.conv, kGradX);
  for (int64_t i = 0; i < 16; ++i) sources_of.write(vector * 16 + i, &sources[0][i], /*spacing=*/16);
  const auto* values = static_cast<const typename E::Scalar*>(product.values);
  for (int64_t unit = begin; unit < end; unit += 16) {
    const __mmask16 lanes = first_lanes(end - unit);
    __m512i taps[kTaps][16];
    for (int64_t t = 0; t < kTaps; ++t) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t source = sources[t][i];
        block[i] = _mm512_maskz_loadu_epi32(
            source < 0 ? 0 : lanes, values + (source < 0 ? 0 : source) * channels + unit * E::kPerUnit);
      }
      transpose_16x16(block);
      for (int64_t i = 0; i < 16; ++i) taps[t][i] = block[i];
    }
    for (int64_t i = 0; i < smaller(16, end - unit); ++i)
      write_units<E, kGradX>(&taps[0][i], out + (unit + i) * kTaps * spacing, spacing);
  }
}

// Rows of the weight for the gradient of x: a row is an input channel, whose nine weights are apart from one
// output channel to the next. The units are those of write_units().
template <class E>
struct TransposedWeight {
  static constexpr int kUnits = kTaps;
  const char* row[kTileRows];
  int64_t channel_bytes;  // from one output channel to the next
  KILN_INLINE __m512i unit(int i, int64_t k, int t) const {
    const char* at = row[i] + k / kUnits * E::kPerUnit * channel_bytes;
    if constexpr (E::kPerUnit == 1) return _mm512_set1_epi32(load_unit(at + 4 * t));
    if (t < 8) return _mm512_set1_epi32(load_unit(at + t / 4 * channel_bytes + t % 4 * 4));
    const __m512i first = _mm512_set1_epi16(load_half(at + 16)),
                  second = _mm512_set1_epi16(load_half(at + channel_bytes + 16));
    return _mm512_mask_blend_epi16(kHighHalves, first, second);
  }
};

template <class E, bool kGradX>
KILN_INLINE auto weight_rows(const PatchProduct& product, int64_t row, int64_t count, int64_t first_channel) {
  constexpr int64_t kBytes = sizeof(typename E::Scalar);
  const auto* weight = static_cast<const char*>(product.weight);
  if constexpr (kGradX) {
    TransposedWeight<E> rows;
    rows.channel_bytes = kTaps * product.conv.in_channels * kBytes;
    for (int i = 0; i < kTileRows; ++i)
      rows.row[i] =
          weight + first_channel * rows.channel_bytes + kTaps * (row + smaller(i, count - 1)) * kBytes;
    return rows;
  } else {
    const int64_t row_bytes = kTaps * product.conv.in_channels * kBytes;
    return spread_rows(weight + row * row_bytes + kTaps * first_channel * kBytes, row_bytes, count);
  }
}

// Brings what `rows` rows from `row` on are multiplied with next into the cache: the nine weights of an input
// channel are far from those of the next output channel, so that the processor does not foresee them.
template <class E>
KILN_INLINE void prefetch_weight(const PatchProduct& product, int64_t row, int64_t rows, int64_t first,
                                 int64_t end) {
  constexpr int64_t kBytes = sizeof(typename E::Scalar);
  for (int64_t channel = first; channel < smaller(end, product.channels()); ++channel) {
    const char* at =
        static_cast<const char*>(product.weight) + kTaps * (channel * product.rows() + row) * kBytes;
    for (int64_t byte = 0; byte < kTaps * rows * kBytes; byte += 64) _mm_prefetch(at + byte, _MM_HINT_T1);
  }
}

template <class E, bool kGradX>
void multiply_piece(const PatchProduct& product, const uint32_t* patches, int64_t row, int64_t pixel) {
  alignas(64) float sums[kPatchRows * kPatchPixels];
  const int64_t channels = product.channels(), units = units_of<E>(channels),
                rows = smaller(kPatchRows, product.rows() - row), vectors = num_vectors(product),
                last_vector = smaller(vectors, (pixel + kPatchPixels) / 16);
  constexpr int64_t kChannels = kPanelUnits / kTaps / 2 * 2;
  for (int64_t channel = 0; channel < channels; channel += kChannels * E::kPerUnit) {
    const int64_t first = units_of<E>(channel),
                  count = units_of<E>(smaller(kChannels * E::kPerUnit, channels - channel));
    for (int64_t vector = pixel / 16; vector < last_vector; vector += kTileVectors) {
      const Panel panel = panel_of(vector, vectors);
      const int64_t columns = panel.vectors * 16;
      const uint32_t* b = patches + panel.first * 16 * units + first * columns;
      float* to = sums + (vector * 16 - pixel) * kPatchRows;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        if constexpr (kGradX) {
          constexpr int64_t kStep = kChannels * E::kPerUnit, kPart = kStep * kTileRows / kPatchRows;
          const int64_t next = channel + kStep + r / kTileRows * kPart;
          if (vector * 16 == pixel) prefetch_weight<E>(product, row, rows, next, next + kPart);
        }
        multiply<E>(panel.vectors,
                    weight_rows<E, kGradX>(product, row + r, smaller(kTileRows, rows - r), channel), b,
                    columns, count, [&](int i, int j, __m512 sum) KILN_LAMBDA {
                      float* at = to + (r + i) * columns + 16 * j;
                      _mm512_store_ps(at, channel > 0 ? _mm512_add_ps(_mm512_load_ps(at), sum) : sum);
                    });
      }
    }
  }
  for (int64_t vector = pixel / 16; vector < last_vector; vector += kTileVectors)
    write_pixels<E>(product, sums + (vector * 16 - pixel) * kPatchRows,
                    panel_of(vector, vectors).vectors * 16, row, rows, vector * 16);
}

// ---- the gradient of the weight ----

template <class E>
void pack_grad_piece(const WeightGradient& product, int64_t first_pixel, void* memory) {
  const PackedGrad<E> packed(product, memory);
  const Sources sources(product.conv, /*is_grad_x=*/false);
  const auto* grad = static_cast<const typename E::Scalar*>(product.grad);
  const int64_t channels = product.conv.out_channels, pixels = product.pixels(),
                begin = first_pixel / E::kPerUnit,
                end = smaller(begin + kGradPixels / E::kPerUnit, grad_units<E>(product));
  for (int64_t unit = begin; unit < end; unit += 16) {
    int32_t at[16 * E::kPerUnit];
    for (int64_t i = 0; i < 16 * E::kPerUnit; ++i) {
      const int64_t pixel = unit * E::kPerUnit + i;
      at[i] = pixel < pixels ? static_cast<int32_t>(pixel) : -1;
      sources.write(pixel, packed.sources + pixel * kTaps, /*spacing=*/1);
    }
    for (int64_t channel = 0; channel < channels; channel += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = load_pixels(E(), grad + channel, channels, at + i * E::kPerUnit, /*spacing=*/1,
                               first_lanes(channels - channel));
      transpose_16x16(block);
      for (int64_t i = 0; i < 16; ++i)
        _mm512_store_si512(packed.rows + (channel + i) * packed.stride + unit, block[i]);
    }
  }
}

// Asks for the lines that a tile's gradients are written to while the tile before it is computed.
template <class Scalar>
KILN_INLINE void prefetch_rows(Scalar* first, int64_t stride, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t byte = 0; byte < kColumns * static_cast<int64_t>(sizeof(Scalar)); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(first + i * stride) + byte, 1);
}

template <class E>
void multiply_grad_piece(const WeightGradient& product, const void* memory, int64_t in, int64_t out,
                         int64_t num_out, void* scratch_memory) {
  using Scalar = typename E::Scalar;
  const PackedGrad<E> packed(product, const_cast<void*>(memory));
  const GradientScratch<E> scratch(product, scratch_memory);
  const int64_t units = grad_units<E>(product), row = kTaps * product.conv.in_channels,
                columns = kTaps * smaller(kGradChannels, product.conv.in_channels - in);
  Scalar* const result = static_cast<Scalar*>(product.result) + out * row + in * kTaps;
  // Taps are brought into the order of the weight in the patches or in the sums, where there are fewer.
  const bool has_ordered_patches = units < num_out;
  for (int64_t first = 0; first < units; first += kGradUnits) {
    const int64_t count = smaller(kGradUnits, units - first);
    write_patches<E>(product, packed.sources, in, first, count, has_ordered_patches, scratch.patches);
    const bool is_written = has_ordered_patches && first + count == units;
    for (int64_t o = 0; o < num_out; o += kTileRows) {
      const int64_t rows = smaller(kTileRows, num_out - o), next = o + kTileRows;
      if (is_written) prefetch_rows(result + next * row, row, smaller(kTileRows, num_out - next));
      const SpreadRows grads =
          spread_rows(packed.rows + (out + o) * packed.stride + first, packed.stride * 4, rows);
      for (int64_t column = 0; column < kColumns; column += 48)
        multiply_tile<E, 3>(grads, scratch.patches + column, kColumns, count,
                            [&](int i, int j, __m512 sum) KILN_LAMBDA {
                              if (i >= rows) return;
                              const int64_t c = column + 16 * j;
                              float* kept = scratch.sums + (o + i) * kColumns + c;
                              if (first > 0) sum = _mm512_add_ps(_mm512_load_ps(kept), sum);
                              if (is_written)
                                store_floats(result + (o + i) * row + c, first_lanes(columns - c), sum);
                              else
                                _mm512_store_ps(kept, sum);
                            });
    }
  }
  if (!has_ordered_patches) write_weight<E>(product, scratch.sums, in, out, num_out, /*is_ordered=*/false);
}

// Calls body(element type, whether it is the gradient of x).
template <class Body>
auto with_kind(const PatchProduct& product, const Body& body) {
  const bool is_f32 = product.conv.dtype == Dtype::kF32;
  if (product.is_grad_x) return is_f32 ? body(F32(), std::true_type()) : body(BF16(), std::true_type());
  return is_f32 ? body(F32(), std::false_type()) : body(BF16(), std::false_type());
}
template <class Body>
auto with_element(const WeightGradient& product, const Body& body) {
  return product.conv.dtype == Dtype::kF32 ? body(F32()) : body(BF16());
}

}  // namespace

void avx512_pack_patches(const PatchProduct& product, int64_t piece, void* patches) {
  with_kind(product, [&](auto element, auto is_grad_x) {
    pack_piece<decltype(element), decltype(is_grad_x)::value>(product, piece,
                                                              static_cast<uint32_t*>(patches));
  });
}

void avx512_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel) {
  if (product.conv.dtype == Dtype::kBF16 && has_matrix_tiles())
    return tiles_multiply_patches(product, patches, row, pixel);
  with_kind(product, [&](auto element, auto is_grad_x) {
    multiply_piece<decltype(element), decltype(is_grad_x)::value>(
        product, static_cast<const uint32_t*>(patches), row, pixel);
  });
}

int64_t packed_grad_bytes(const WeightGradient& product) {
  return with_element(product, [&](auto element) {
    return static_cast<int64_t>(PackedGrad<decltype(element)>(product, nullptr).scratch.used);
  });
}

void pack_grad(const WeightGradient& product, int64_t first_pixel, void* packed) {
  with_element(product,
               [&](auto element) { pack_grad_piece<decltype(element)>(product, first_pixel, packed); });
}

int64_t weight_gradient_scratch(const WeightGradient& product) {
  return with_element(product, [&](auto element) {
    return static_cast<int64_t>(GradientScratch<decltype(element)>(product, nullptr).scratch.used);
  });
}

void multiply_grad(const WeightGradient& product, const void* packed, int64_t in, int64_t out,
                   int64_t num_out, void* scratch) {
  if (product.conv.dtype == Dtype::kBF16 && has_matrix_tiles())
    return tiles_multiply_grad(product, packed, in, out, num_out, scratch);
  with_element(product, [&](auto element) {
    multiply_grad_piece<decltype(element)>(product, packed, in, out, num_out, scratch);
  });
}

}  // namespace kiln::ops::cpu

#endif
