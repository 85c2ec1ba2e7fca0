// Attention of one head in AVX-512: what a product's right operand is packed into, once per head. It is
// packed by `pack_transposed` where the contraction runs along a token's elements, by `pack_rows` where it
// runs over tokens. As with every such header, nothing from a shared one may be instantiated after this
// include.
#pragma once
#include <cmath>

#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int kPanel = 64;  // keys of one packed panel
constexpr float kLog2E = 1.4426950408889634f;

// Returns 2^x to f32 accuracy. Lanes outside the mask are 0. NaN stays NaN.
KILN_INLINE __m512 exp2_masked(__mmask16 mask, __m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);  // [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(1.3264727e-3f);  // minimax polynomial, error 9e-8
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6715130e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507336e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314700e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(mask, p, whole);
}

// Tokens lie too far apart for the processor to foresee the next one. The address may lie beyond the tensor.
constexpr int kPrefetchTokens = 16;
KILN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Packs (num_tokens, head_dim) into panels of up to 64 tokens, each (head_dim units, tokens of the panel
// rounded up to 32).
template <class E>
void pack_transposed(const void* rows, int64_t stride, int64_t num_tokens, int64_t head_dim, uint32_t* out) {
  const auto* source = static_cast<const typename E::Scalar*>(rows);
  const int64_t units = head_dim / E::kPerUnit;
  for (int64_t panel = 0; panel < num_tokens; panel += kPanel) {
    const int64_t width = smaller(kPanel, round_up(num_tokens - panel, 32));
    for (int64_t column = 0; column < width; column += 16) {
      const int64_t tokens = smaller(16, num_tokens - panel - column);
      for (int64_t unit = 0; unit < units; unit += 16) {
        __m512i block[16];
        for (int64_t i = 0; i < 16; ++i) {
          prefetch(source + (panel + column + 16 + i) * stride + unit * E::kPerUnit);
          block[i] = i < tokens ? _mm512_maskz_loadu_epi32(
                                      first_lanes(units - unit),
                                      source + (panel + column + i) * stride + unit * E::kPerUnit)
                                : _mm512_setzero_si512();
        }
        transpose_16x16(block);
        for (int64_t i = 0; i < smaller(16, units - unit); ++i)
          _mm512_store_si512(out + (unit + i) * width + column, block[i]);
      }
    }
    out += units * width;
  }
}

// Packs (num_tokens, head_dim) into (units of the padded tokens, head_dim rounded up to 16), with zeros
// beyond tokens and elements.
template <class E>
void pack_rows(const void* rows, int64_t stride, int64_t num_tokens, int64_t padded_tokens, int64_t head_dim,
               uint32_t* out) {
  const auto* source = static_cast<const typename E::Scalar*>(rows);
  const int64_t width = round_up(head_dim, 16);
  for (int64_t token = 0; token < num_tokens; token += E::kPerUnit) {
    const auto* row = source + token * stride;
    for (int64_t column = 0; column < width; column += 16) {
      const __mmask16 mask = first_lanes(head_dim - column);
      for (int i = 0; i < E::kPerUnit; ++i) prefetch(row + (kPrefetchTokens + i) * stride + column);
      if constexpr (E::kPerUnit == 1) {
        _mm512_store_ps(out + column, _mm512_maskz_loadu_ps(mask, row + column));
      } else {
        const __m256i low = _mm256_maskz_loadu_epi16(mask, row + column);
        const __m256i high = token + 1 < num_tokens ? _mm256_maskz_loadu_epi16(mask, row + stride + column)
                                                    : _mm256_setzero_si256();
        _mm512_store_si512(out + column, _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
      }
    }
    out += width;
  }
  const uint32_t* end = out + (padded_tokens - round_up(num_tokens, E::kPerUnit)) / E::kPerUnit * width;
  for (; out < end; out += 16) _mm512_store_si512(out, _mm512_setzero_si512());
}

struct Sizes {
  int64_t keys;         // number of keys, rounded up to 32: a vector of bf16
  int64_t key_units;    // units along the keys
  int64_t queries;      // like keys
  int64_t query_units;  // units along the queries
  int64_t dim_units;    // units along a token's elements
  int64_t dim;          // elements of a padded token
  int64_t pair_stride;  // units between rows of the probabilities; an odd number of cache lines, so that
                        // columns do not collide
};
template <class E>
KILN_INLINE Sizes sizes_of(const AttentionSizes& of) {
  const int64_t keys = round_up(of.num_keys, 32), queries = round_up(of.num_queries, 32);
  return {.keys = keys,
          .key_units = keys / E::kPerUnit,
          .queries = queries,
          .query_units = queries / E::kPerUnit,
          .dim_units = of.head_dim / E::kPerUnit,
          .dim = round_up(of.head_dim, 16),
          .pair_stride = round_up(keys, 64) + 16};
}

template <class E, template <class> class Pieces>
std::size_t scratch_bytes(const AttentionSizes& sizes) {
  Scratch scratch{nullptr};
  Pieces<E>(scratch, sizes_of<E>(sizes));
  return scratch.used;
}

}  // namespace
}  // namespace kiln::ops::cpu
