// Attention's products by matrix tiles, and how its tokens are packed for them.
#pragma once
#include "ops/cpu/attention_avx512-inl.h"
#include "ops/cpu/tiles-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kBlock = 32;  // tokens of a panel, and of a block of rows

// Multiplies 32 rows of A by units of `dim` columns, and stores, as bf16 or f32, the rows and columns that
// exist. `finish(row, sum)` may first change a vector of a row.
template <class Scalar, class Finish>
KILN_INLINE void store_product(const uint16_t* a, int64_t a_stride, const uint32_t* units, int64_t dim,
                               int64_t depth, Scalar* out, int64_t out_stride, int64_t num_rows,
                               int64_t head_dim, Finish&& finish) {
  alignas(64) float sums[kBlock * kBlock];
  for (int64_t column = 0; column < dim; column += kBlock) {
    const bool is_single = dim - column <= kTileSide;
    if (is_single)
      multiply_tiles<2, 1>(a, 2 * a_stride, units + column, 4 * dim, depth, sums, 4 * kBlock);
    else
      multiply_tiles<2, 2>(a, 2 * a_stride, units + column, 4 * dim, depth, sums, 4 * kBlock);
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t half = 0; half < (is_single ? 1 : 2); ++half)
        store_floats(out + row * out_stride + column + 16 * half, first_lanes(head_dim - column - 16 * half),
                     finish(row, _mm512_load_ps(sums + row * kBlock + 16 * half)));
  }
}

// Packs tokens into panels of 32, each (units along a token's elements, 32), with zeros beyond tokens and
// elements.
inline void pack_panels(const uint16_t* rows, int64_t stride, int64_t num_tokens, int64_t head_dim,
                        int64_t units, uint32_t* out) {
  for (int64_t panel = 0; panel < num_tokens; panel += kBlock, out += units * kBlock)
    for (int64_t column = 0; column < kBlock; column += 16)
      for (int64_t unit = 0; unit < units; unit += 16) {
        __m512i block[16];
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t token = panel + column + i;
          block[i] = token < num_tokens ? _mm512_maskz_loadu_epi32(first_lanes(head_dim / 2 - unit),
                                                                   rows + token * stride + 2 * unit)
                                        : _mm512_setzero_si512();
        }
        transpose_16x16(block);
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + (unit + i) * kBlock + column, block[i]);
      }
}

// Copies 32 tokens as rows of `depth` elements, with zeros beyond tokens and elements.
inline void copy_block(const uint16_t* rows, int64_t stride, int64_t num_tokens, int64_t head_dim,
                       int64_t depth, uint16_t* out) {
  for (int64_t i = 0; i < kBlock; ++i)
    for (int64_t d = 0; d < depth; d += 32)
      _mm512_store_si512(
          out + i * depth + d,
          i < num_tokens ? _mm512_maskz_loadu_epi32(first_lanes((head_dim - d) / 2), rows + i * stride + d)
                         : _mm512_setzero_si512());
}

}  // namespace
}  // namespace kiln::ops::cpu
