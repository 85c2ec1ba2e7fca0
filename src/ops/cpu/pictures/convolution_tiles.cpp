#include "ops/cpu/instruction_set.h"
#include "ops/cpu/pictures/convolution_kernel.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/pictures/convolution_avx512-inl.h"
#include "ops/cpu/tiles-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kBlockChannels = 64;  // of a contraction that are multiplied at once
constexpr int64_t kBlockUnits = kBlockChannels / 2 * kTaps;
constexpr int64_t kBlockStride = (kBlockUnits / 16 | 1) * 16;

// C (rows, columns) = A B, or C += A B. rows and columns are multiples of 16; strides are in bytes.
KILN_INLINE void multiply_block(const void* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                                int64_t units, bool adds, float* out, int64_t out_stride, int64_t rows,
                                int64_t columns) {
  const auto* left = static_cast<const char*>(a);
  const auto multiply_tiles_of = [&](auto num_rows, auto num_columns, int64_t row,
                                     int64_t column) KILN_LAMBDA {
    constexpr int kRows = decltype(num_rows)::value, kWidth = decltype(num_columns)::value;
    float* to = out + row * out_stride / 4 + column;
    if (adds)
      multiply_tiles<kRows, kWidth, true>(left + row * a_stride, a_stride, b + column, b_stride, units / 16,
                                          to, out_stride);
    else
      multiply_tiles<kRows, kWidth>(left + row * a_stride, a_stride, b + column, b_stride, units / 16, to,
                                    out_stride);
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  for (int64_t row = 0; row < rows; row += 32)
    for (int64_t column = 0; column < columns; column += 32) {
      const bool is_low = rows - row < 32, is_narrow = columns - column < 32;
      if (is_low && is_narrow)
        multiply_tiles_of(One(), One(), row, column);
      else if (is_low)
        multiply_tiles_of(One(), Two(), row, column);
      else if (is_narrow)
        multiply_tiles_of(Two(), One(), row, column);
      else
        multiply_tiles_of(Two(), Two(), row, column);
    }
}

// Copies rows of the weight for the gradient of x, in the units of write_units(): the weights of an input
// channel to two output channels, pair after pair.
inline void copy_transposed(const PatchProduct& product, int64_t row, int64_t rows, int64_t first,
                            int64_t channels, uint32_t* out) {
  const int64_t next = kTaps * product.conv.in_channels;
  const auto* weight = static_cast<const uint16_t*>(product.weight) + first * next + row * kTaps;
  for (int64_t channel = 0; channel < channels; channel += 2, weight += 2 * next)
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* from = weight + r * kTaps;
      uint32_t* to = out + r * kBlockStride + channel / 2 * kTaps;
      std::memcpy(to, from, 16);
      std::memcpy(to + 4, from + next, 16);
      to[8] = from[8] | static_cast<uint32_t>(from[next + 8]) << 16;
    }
}

}  // namespace

void tiles_multiply_patches(const PatchProduct& product, const void* patches, int64_t row, int64_t pixel) {
  alignas(64) float sums[kPatchRows * kPatchPixels];
  alignas(64) uint32_t transposed[kPatchRows * kBlockStride];
  const int64_t channels = product.channels(), units = units_of<BF16>(channels),
                rows = smaller(kPatchRows, product.rows() - row), vectors = num_vectors(product),
                last_vector = smaller(vectors, (pixel + kPatchPixels) / 16),
                row_bytes = kTaps * product.conv.in_channels * 2;
  const TilesInUse tiles;
  for (int64_t channel = 0; channel < channels; channel += kBlockChannels) {
    const int64_t num_channels = smaller(kBlockChannels, channels - channel), first = units_of<BF16>(channel);
    const char* weight = static_cast<const char*>(product.weight) + row * row_bytes + 4 * first;
    if (product.is_grad_x) copy_transposed(product, row, rows, channel, num_channels, transposed);
    for (int64_t vector = pixel / 16; vector < last_vector; vector += kTileVectors) {
      const Panel panel = panel_of(vector, vectors);
      const int64_t columns = panel.vectors * 16;
      const uint32_t* b = static_cast<const uint32_t*>(patches) + panel.first * 16 * units + first * columns;
      multiply_block(product.is_grad_x ? static_cast<const void*>(transposed) : weight,
                     product.is_grad_x ? 4 * kBlockStride : row_bytes, b, 4 * columns,
                     units_of<BF16>(num_channels), channel > 0, sums + (vector * 16 - pixel) * kPatchRows,
                     4 * columns, rows, columns);
    }
  }
  for (int64_t vector = pixel / 16; vector < last_vector; vector += kTileVectors)
    write_pixels<BF16>(product, sums + (vector * 16 - pixel) * kPatchRows,
                       panel_of(vector, vectors).vectors * 16, row, rows, vector * 16);
}

void tiles_multiply_grad(const WeightGradient& product, const void* memory, int64_t in, int64_t out,
                         int64_t num_out, void* scratch_memory) {
  const PackedGrad<BF16> packed(product, const_cast<void*>(memory));
  const GradientScratch<BF16> scratch(product, scratch_memory);
  const int64_t units = grad_units<BF16>(product);
  const bool has_ordered_patches = units < num_out;
  const TilesInUse tiles;
  for (int64_t first = 0; first < units; first += kGradUnits) {
    const int64_t count = smaller(kGradUnits, units - first);
    write_patches<BF16>(product, packed.sources, in, first, count, has_ordered_patches, scratch.patches);
    multiply_block(packed.rows + out * packed.stride + first, 4 * packed.stride, scratch.patches,
                   4 * kColumns, count, first > 0, scratch.sums, 4 * kColumns, round_up(num_out, 16),
                   kColumns);
  }
  write_weight<BF16>(product, scratch.sums, in, out, num_out, has_ordered_patches);
}

}  // namespace kiln::ops::cpu

#endif
