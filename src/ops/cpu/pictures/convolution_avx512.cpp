#include "ops/cpu/instruction_set.h"
#include "ops/cpu/pictures/convolution_kernel.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kTaps = 9;          // weights of a kernel
constexpr int64_t kPanelUnits = 256;  // of a contraction that are multiplied at once: they stay in the caches
constexpr int64_t kPieceUnits = 64;   // of a patch's channels that one piece packs
constexpr int64_t kGradUnits = 128;   // of pixels that are summed at once
constexpr int64_t kColumns = kTaps * kGradChannels;
constexpr int64_t kSlack = 16;  // elements behind interleaved taps that are written as well

// ---- which pixels meet ----

// Returns the pixel of the values that tap (0 to 8) of a pixel of the result meets, -1 if none.
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

  // Writes those of one pixel, `spacing` elements apart.
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

// ---- patches ----

// Units of the contraction over so many channels.
template <class E>
KILN_INLINE int64_t units_of(int64_t channels) {
  return kTaps * channels / E::kPerUnit;
}

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

// The vectors of 16 pixels lie in panels of up to four, one panel behind the other.
struct Panel {
  int64_t first, vectors;
};
KILN_INLINE int64_t num_vectors(const PatchProduct& product) { return (product.pixels() + 15) / 16; }
KILN_INLINE Panel panel_of(int64_t vector, int64_t vectors) {
  const int64_t first = vector / kTileVectors * kTileVectors;
  return {first, smaller(kTileVectors, vectors - first)};
}

template <class E, bool kGradX>
void pack_piece(const PatchProduct& product, int64_t piece, uint32_t* patches) {
  const int64_t channels = product.channels(), channel_units = channels / E::kPerUnit,
                vectors = num_vectors(product), vector = piece % vectors,
                begin = piece / vectors * kPieceUnits, end = smaller(begin + kPieceUnits, channel_units);
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
KILN_INLINE int64_t grad_units(const WeightGradient& product) {
  return (product.pixels() + E::kPerUnit - 1) / E::kPerUnit;
}

// What pack_grad() writes: tiles of kTileRows output channels, each (units, kTileRows), and the sources of
// all taps of every pixel.
template <class E>
struct PackedGrad {
  uint32_t* tiles;
  int32_t* sources;
  Scratch scratch;
  PackedGrad(const WeightGradient& product, void* packed) : scratch{static_cast<char*>(packed)} {
    const int64_t units = grad_units<E>(product);
    tiles = scratch.take<uint32_t>(round_up(product.conv.out_channels, kTileRows) * units);
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

template <class E>
void pack_grad_piece(const WeightGradient& product, int64_t first_pixel, void* memory) {
  const PackedGrad<E> packed(product, memory);
  const Sources sources(product.conv, /*is_grad_x=*/false);
  const auto* grad = static_cast<const typename E::Scalar*>(product.grad);
  const int64_t channels = product.conv.out_channels, pixels = product.pixels(),
                units = grad_units<E>(product);
  constexpr int64_t kBlock = 8 * kTileRows;
  const int64_t end = smaller(first_pixel + kGradPixels, pixels);
  for (int64_t pixel = first_pixel; pixel < end; pixel += E::kPerUnit) {
    int32_t at[2];
    for (int64_t i = 0; i < E::kPerUnit; ++i) {
      at[i] = pixel + i < pixels ? static_cast<int32_t>(pixel + i) : -1;
      sources.write(pixel + i, packed.sources + (pixel + i) * kTaps, /*spacing=*/1);
    }
    for (int64_t channel = 0; channel < channels; channel += kBlock) {
      alignas(64) uint32_t block[kBlock];
      for (int64_t i = 0; i < kBlock; i += 16)
        _mm512_store_si512(block + i, load_pixels(E(), grad + channel + i, channels, at, /*spacing=*/1,
                                                  first_lanes(channels - channel - i)));
      for (int64_t i = 0; i < smaller(kBlock, channels - channel); i += kTileRows)
        std::memcpy(packed.tiles + ((channel + i) * units + pixel / E::kPerUnit * kTileRows), block + i,
                    kTileRows * sizeof(uint32_t));
    }
  }
}

// Writes nine vectors of 16 channels, one for each tap, as 16 channels of nine taps, and kSlack / 2 elements
// more.
KILN_INLINE void interleave_taps(const __m512i* taps, uint32_t* out) {
  __m512i block[16];
  for (int64_t t = 0; t < 16; ++t) block[t] = t < kTaps ? taps[t] : _mm512_setzero_si512();
  transpose_16x16(block);
  for (int64_t c = 0; c < 16; ++c) _mm512_storeu_si512(out + c * kTaps, block[c]);
}

// Writes a row of the gradient: what nine weights of each of 16 channels are in its order.
template <class Scalar>
KILN_INLINE void write_gradient(const uint32_t* row, Scalar* to, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 16)
    store_floats(to + c, first_lanes(columns - c), _mm512_castsi512_ps(_mm512_load_si512(row + c)));
}

template <class E>
struct GradientScratch {
  uint32_t* patches;
  float* sums;
  Scratch scratch;
  GradientScratch(const WeightGradient& product, void* memory) : scratch{static_cast<char*>(memory)} {
    patches = scratch.take<uint32_t>(kGradUnits * kColumns + kSlack);
    sums = scratch.take<float>(round_up(product.conv.out_channels, kTileRows) * kColumns);
  }
};

template <class E>
void multiply_grad_piece(const WeightGradient& product, const void* memory, int64_t in, int64_t out,
                         int64_t num_out, void* scratch_memory) {
  using Scalar = typename E::Scalar;
  const PackedGrad<E> packed(product, const_cast<void*>(memory));
  const GradientScratch<E> scratch(product, scratch_memory);
  const int64_t units = grad_units<E>(product), channels = product.conv.in_channels;
  const __mmask16 lanes = first_lanes(channels - in);
  const int64_t columns = kTaps * smaller(kGradChannels, channels - in);
  const auto* x = static_cast<const Scalar*>(product.x) + in;
  const auto to = [&](int64_t o) KILN_LAMBDA {
    return static_cast<Scalar*>(product.result) + ((out + o) * channels + in) * kTaps;
  };
  // Taps are brought into the order of the weight in the patches or in the sums, where there are fewer.
  const bool has_ordered_patches = units < num_out;
  for (int64_t first = 0; first < units; first += kGradUnits) {
    const int64_t count = smaller(kGradUnits, units - first);
    for (int64_t u = 0; u < count; ++u) {
      const int32_t* at = packed.sources + (first + u) * E::kPerUnit * kTaps;
      __m512i taps[kTaps];
      for (int64_t t = 0; t < kTaps; ++t) taps[t] = load_pixels(E(), x, channels, at + t, kTaps, lanes);
      uint32_t* row = scratch.patches + u * kColumns;
      if (has_ordered_patches)
        interleave_taps(taps, row);
      else
        for (int64_t t = 0; t < kTaps; ++t) _mm512_store_si512(row + t * 16, taps[t]);
    }
    const bool is_written = has_ordered_patches && first + count == units;
    for (int64_t o = 0; o < num_out; o += kTileRows) {
      if (is_written)
        for (int64_t i = 0; i < smaller(kTileRows, num_out - o - kTileRows); ++i)
          for (int64_t byte = 0; byte < kColumns * static_cast<int64_t>(sizeof(Scalar)); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(to(o + kTileRows + i)) + byte, 1);
      const AdjacentRows rows{packed.tiles + (out + o) * units + first * kTileRows, kTileRows};
      for (int64_t column = 0; column < kColumns; column += 48)
        multiply_tile<E, 3>(rows, scratch.patches + column, kColumns, count,
                            [&](int i, int j, __m512 sum) KILN_LAMBDA {
                              const int64_t c = column + 16 * j;
                              float* kept = scratch.sums + (o + i) * kColumns + c;
                              if (first > 0) sum = _mm512_add_ps(_mm512_load_ps(kept), sum);
                              if (!is_written)
                                _mm512_store_ps(kept, sum);
                              else if (o + i < num_out)
                                store_floats(to(o + i) + c, first_lanes(columns - c), sum);
                            });
    }
  }
  if (has_ordered_patches) return;
  for (int64_t o = 0; o < num_out; ++o) {
    alignas(64) uint32_t row[kColumns + kSlack];
    __m512i taps[kTaps];
    for (int64_t t = 0; t < kTaps; ++t) taps[t] = _mm512_load_si512(scratch.sums + o * kColumns + t * 16);
    interleave_taps(taps, row);
    write_gradient(row, to(o), columns);
  }
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

int64_t patches_bytes(const PatchProduct& product) {
  return with_kind(product, [&](auto element, auto) {
    return num_vectors(product) * 64 * units_of<decltype(element)>(product.channels());
  });
}

int64_t num_patch_pieces(const PatchProduct& product) {
  const int64_t per_unit = product.conv.dtype == Dtype::kF32 ? 1 : 2;
  return num_vectors(product) * ((product.channels() / per_unit + kPieceUnits - 1) / kPieceUnits);
}

void pack_patches(const PatchProduct& product, int64_t piece, void* patches) {
  with_kind(product, [&](auto element, auto is_grad_x) {
    pack_piece<decltype(element), decltype(is_grad_x)::value>(product, piece,
                                                              static_cast<uint32_t*>(patches));
  });
}

void multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel) {
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
  with_element(product, [&](auto element) {
    multiply_grad_piece<decltype(element)>(product, packed, in, out, num_out, scratch);
  });
}

}  // namespace kiln::ops::cpu

#endif
