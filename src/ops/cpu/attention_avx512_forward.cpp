// Forward attention of one head in AVX-512.
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/attention_avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int kForwardRows = 24;  // query rows whose scores are held at once in forward

template <class E>
struct ForwardScratch {
  uint32_t *keys, *values, *probabilities;
  float *scores, *inverse_sum;
  ForwardScratch(Scratch& scratch, const Sizes& size) {
    keys = scratch.take<uint32_t>(size.keys * size.dim_units);
    values = scratch.take<uint32_t>(size.key_units * size.dim);
    probabilities = scratch.take<uint32_t>(kForwardRows * size.key_units);
    scores = scratch.take<float>(kForwardRows * size.keys);
    inverse_sum = scratch.take<float>(kForwardRows);
  }
};

// Writes exp2 of one row of scores less its maximum, as units along the keys. Returns log2 of the sum, and
// its inverse in `inverse`. Scores with a mask are natural logarithms, since a mask may be the least number.
template <class E, bool kMasked>
KILN_APART float softmax_row(const float* scores, int64_t num_keys, int64_t padded, uint32_t* out,
                             float* inverse) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  int64_t j = 0;
  for (; j + 16 <= num_keys; j += 16) top = _mm512_max_ps(top, _mm512_load_ps(scores + j));
  if (j < num_keys) top = _mm512_mask_max_ps(top, first_lanes(num_keys - j), top, _mm512_load_ps(scores + j));
  const float maximum = _mm512_reduce_max_ps(top);
  const __m512 shift = _mm512_set1_ps(maximum);
  const auto below_top = [&](int64_t at) KILN_LAMBDA {
    const __m512 less = _mm512_sub_ps(_mm512_load_ps(scores + at), shift);
    // This order of operands keeps NaN.
    return kMasked ? _mm512_max_ps(_mm512_set1_ps(-1e30f), _mm512_mul_ps(less, _mm512_set1_ps(kLog2E)))
                   : less;
  };
  __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
  for (j = 0; j < padded; j += 32) {
    const __m512 p0 = exp2_masked(first_lanes(num_keys - j), below_top(j));
    const __m512 p1 = exp2_masked(first_lanes(num_keys - j - 16), below_top(j + 16));
    sum0 = _mm512_add_ps(sum0, p0);
    sum1 = _mm512_add_ps(sum1, p1);
    if constexpr (E::kPerUnit == 1) {
      _mm512_store_ps(out + j, p0);
      _mm512_store_ps(out + j + 16, p1);
    } else {
      _mm512_store_si512(out + j / 2, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
    }
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
  *inverse = 1.0f / sum;
  return (kMasked ? maximum * kLog2E : maximum) + __builtin_log2f(sum);
}

template <class E, bool kMasked>
void forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* memory) {
  using Scalar = typename E::Scalar;
  const int64_t num_keys = args.num_keys, head_dim = args.head_dim;
  const Sizes size = sizes_of<E>({.num_queries = 0, .num_keys = num_keys, .head_dim = head_dim});
  Scratch scratch{static_cast<char*>(memory)};
  const ForwardScratch<E> s(scratch, size);
  pack_transposed<E>(args.k, args.k_stride, num_keys, head_dim, s.keys);
  pack_rows<E>(args.v, args.v_stride, num_keys, size.keys, head_dim, s.values);
  const __m512 scale = _mm512_set1_ps(kMasked ? args.scale : args.scale * kLog2E);
  const int64_t row_bytes = args.q_stride * static_cast<int64_t>(sizeof(Scalar));

  for (int64_t row = row_begin; row < row_end; row += kForwardRows) {
    const int64_t rows = smaller(kForwardRows, row_end - row);
    for (int64_t i = 0; i < kForwardRows; ++i)
      for (int64_t d = 0; d < head_dim; d += 64 / static_cast<int64_t>(sizeof(Scalar)))
        prefetch(static_cast<const Scalar*>(args.q) + (row + kForwardRows + i) * args.q_stride + d);
    const uint32_t* panel = s.keys;
    for (int64_t key = 0; key < num_keys; key += kPanel) {
      const int64_t width = smaller(kPanel, round_up(num_keys - key, 32));
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const SpreadRows q =
            spread_rows(static_cast<const Scalar*>(args.q) + (row + i) * args.q_stride, row_bytes, rows - i);
        // kForwardRows is a multiple of the tile rows, so repeated rows have room.
        float* tile = s.scores + i * size.keys + key;
        const float* mask = kMasked ? args.mask.values + (row + i) * args.mask.stride + key : nullptr;
        multiply<E>(width / 16, q, panel, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
          __m512 score = _mm512_mul_ps(sum, scale);
          if constexpr (kMasked)
            score = _mm512_add_ps(
                score, _mm512_maskz_loadu_ps(first_lanes(num_keys - key - 16 * c),
                                             mask + smaller(r, rows - i - 1) * args.mask.stride + 16 * c));
          _mm512_store_ps(tile + r * size.keys + 16 * c, score);
        });
      }
      panel += width * size.dim_units;
    }
    for (int64_t i = 0; i < rows; ++i)
      args.log2_sum[row + i] =
          softmax_row<E, kMasked>(s.scores + i * size.keys, num_keys, size.keys,
                                  s.probabilities + i * size.key_units, s.inverse_sum + i);
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const SpreadRows p = spread_rows(s.probabilities + i * size.key_units, size.key_units * 4, rows - i);
      for_column_chunks(size.dim / 16, [&](int64_t first, int64_t count) KILN_LAMBDA {
        Scalar* out = static_cast<Scalar*>(args.out) + (row + i) * args.out_stride + first * 16;
        multiply<E>(count, p, s.values + first * 16, size.dim, size.key_units,
                    [&](int r, int c, __m512 sum) KILN_LAMBDA {
                      if (r < rows - i)
                        store_floats(out + r * args.out_stride + 16 * c,
                                     first_lanes(head_dim - (first + c) * 16),
                                     _mm512_mul_ps(sum, _mm512_set1_ps(s.inverse_sum[i + r])));
                    });
      });
    }
  }
}

}  // namespace

std::size_t avx512_forward_scratch(AttentionType type, const AttentionSizes& sizes) {
  if (type == AttentionType::kF32) return scratch_bytes<F32, ForwardScratch>(sizes);
  const std::size_t bytes = scratch_bytes<BF16, ForwardScratch>(sizes);  // tiles take no mask
  return has_matrix_tiles() ? std::max(bytes, tiles_forward_scratch(sizes)) : bytes;
}

void avx512_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch) {
  const bool is_masked = args.mask.values != nullptr;
  if (type == AttentionType::kBF16 && !is_masked && has_matrix_tiles())
    return tiles_forward_head(args, row_begin, row_end, scratch);
  const auto forward = type == AttentionType::kF32
                           ? (is_masked ? forward_head<F32, true> : forward_head<F32, false>)
                           : (is_masked ? forward_head<BF16, true> : forward_head<BF16, false>);
  forward(args, row_begin, row_end, scratch);
}

}  // namespace kiln::ops::cpu
#endif
