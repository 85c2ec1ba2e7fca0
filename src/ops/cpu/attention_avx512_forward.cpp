// Forward attention of one head in AVX-512.
#include "ops/cpu/attention_kernel.h"

#if KILN_AVX512_ATTENTION
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
// its inverse in `inverse`.
template <class E>
KILN_APART float softmax_row(const float* scores, int64_t num_tokens, int64_t padded, uint32_t* out,
                             float* inverse) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  int64_t j = 0;
  for (; j + 16 <= num_tokens; j += 16) top = _mm512_max_ps(top, _mm512_load_ps(scores + j));
  if (j < num_tokens)
    top = _mm512_mask_max_ps(top, first_lanes(num_tokens - j), top, _mm512_load_ps(scores + j));
  const float maximum = _mm512_reduce_max_ps(top);
  const __m512 shift = _mm512_set1_ps(maximum);
  __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
  for (j = 0; j < padded; j += 32) {
    const __m512 p0 =
        exp2_masked(first_lanes(num_tokens - j), _mm512_sub_ps(_mm512_load_ps(scores + j), shift));
    const __m512 p1 =
        exp2_masked(first_lanes(num_tokens - j - 16), _mm512_sub_ps(_mm512_load_ps(scores + j + 16), shift));
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
  return maximum + __builtin_log2f(sum);
}

template <class E>
void forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* memory) {
  using Scalar = typename E::Scalar;
  const int64_t num_tokens = args.num_tokens, head_dim = args.head_dim;
  const Sizes size = sizes_of<E>(num_tokens, head_dim);
  Scratch scratch{static_cast<char*>(memory)};
  const ForwardScratch<E> s(scratch, size);
  pack_transposed<E>(args.k, args.qkv_stride, num_tokens, head_dim, s.keys);
  pack_rows<E>(args.v, args.qkv_stride, num_tokens, size.keys, head_dim, s.values);
  const __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
  const int64_t row_bytes = args.qkv_stride * static_cast<int64_t>(sizeof(Scalar));

  for (int64_t row = row_begin; row < row_end; row += kForwardRows) {
    const int64_t rows = smaller(kForwardRows, row_end - row);
    for (int64_t i = 0; i < kForwardRows; ++i)
      for (int64_t d = 0; d < head_dim; d += 64 / static_cast<int64_t>(sizeof(Scalar)))
        prefetch(static_cast<const Scalar*>(args.q) + (row + kForwardRows + i) * args.qkv_stride + d);
    const uint32_t* panel = s.keys;
    for (int64_t key = 0; key < num_tokens; key += kPanel) {
      const int64_t width = smaller(kPanel, round_up(num_tokens - key, 32));
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const SpreadRows q = spread_rows(static_cast<const Scalar*>(args.q) + (row + i) * args.qkv_stride,
                                         row_bytes, rows - i);
        // kForwardRows is a multiple of the tile rows, so repeated rows have room.
        float* tile = s.scores + i * size.keys + key;
        multiply<E>(width / 16, q, panel, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
          _mm512_store_ps(tile + r * size.keys + 16 * c, _mm512_mul_ps(sum, scale));
        });
      }
      panel += width * size.dim_units;
    }
    for (int64_t i = 0; i < rows; ++i)
      args.log2_sum[row + i] = softmax_row<E>(s.scores + i * size.keys, num_tokens, size.keys,
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

std::size_t avx512_forward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim) {
  if (type == AttentionType::kF32) return scratch_bytes<F32, ForwardScratch>(num_tokens, head_dim);
  return has_matrix_tiles() ? tiles_forward_scratch(num_tokens, head_dim)
                            : scratch_bytes<BF16, ForwardScratch>(num_tokens, head_dim);
}

void avx512_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch) {
  if (type == AttentionType::kF32)
    forward_head<F32>(args, row_begin, row_end, scratch);
  else if (has_matrix_tiles())
    tiles_forward_head(args, row_begin, row_end, scratch);
  else
    forward_head<BF16>(args, row_begin, row_end, scratch);
}

}  // namespace kiln::ops::cpu
#endif
