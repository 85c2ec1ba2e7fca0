// Backward attention of one head in AVX-512.
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/attention_avx512-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int kBackwardRows = 96;  // query rows whose probabilities are held at once in backward
constexpr float kNoRow = 1e30f;    // log2_sum of a row that does not exist: its probabilities are 0

template <class E>
struct BackwardScratch {
  uint32_t *keys_t, *values_t;       // packed for products along a token's elements
  uint32_t *keys, *queries, *grads;  // packed for products over tokens
  uint32_t *p_t, *ds_t, *ds;         // of a block of query rows, in units of rows (_t) or of keys
  int64_t ds_stride;
  float *grad_k, *grad_v;   // (keys, dim): sums over the blocks
  float *log2_sum, *delta;  // of the block
  float *scores, *grad_p;   // of a tile
  BackwardScratch(Scratch& scratch, const Sizes& size) {
    keys_t = scratch.take<uint32_t>(size.keys * size.dim_units);
    values_t = scratch.take<uint32_t>(size.keys * size.dim_units);
    keys = scratch.take<uint32_t>(size.key_units * size.dim);
    queries = scratch.take<uint32_t>(size.query_units * size.dim);
    grads = scratch.take<uint32_t>(size.query_units * size.dim);
    p_t = scratch.take<uint32_t>(kBackwardRows / E::kPerUnit * size.pair_stride);
    ds_t = scratch.take<uint32_t>(kBackwardRows / E::kPerUnit * size.pair_stride);
    ds = E::kPerUnit == 1 ? ds_t : scratch.take<uint32_t>(kBackwardRows * size.key_units);
    ds_stride = E::kPerUnit == 1 ? size.pair_stride : size.key_units;
    grad_k = scratch.take<float>((size.keys + kTileRows) * size.dim);
    grad_v = scratch.take<float>((size.keys + kTileRows) * size.dim);
    log2_sum = scratch.take<float>(kBackwardRows);
    delta = scratch.take<float>(kBackwardRows);
    scores = scratch.take<float>(kTileRows * kPanel);
    grad_p = scratch.take<float>(kTileRows * kPanel);
  }
};

// Computes delta = sum(grad_out * out) of each row (Dao et al. 2022, eq. 4), and copies the softmax sums.
// Both are neutral beyond `rows`.
template <class E>
void row_terms(const AttentionBackward& args, int64_t row, int64_t rows, const BackwardScratch<E>& s) {
  using Scalar = typename E::Scalar;
  for (int64_t i = 0; i < kBackwardRows; ++i) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t d = 0; i < rows && d < args.head_dim; d += 16) {
      const __mmask16 mask = first_lanes(args.head_dim - d);
      const int64_t at = (row + i) * args.out_stride + d;
      sum = _mm512_fmadd_ps(load_floats(static_cast<const Scalar*>(args.out) + at, mask),
                            load_floats(static_cast<const Scalar*>(args.grad_out) + at, mask), sum);
    }
    s.delta[i] = _mm512_reduce_add_ps(sum);
    s.log2_sum[i] = i < rows ? args.log2_sum[row + i] : kNoRow;
  }
}

// Computes p = exp2(scores - log2_sum) and ds = p * (grad_p - delta) of a tile of scores and grad_p. Both are
// stored in units of rows, and ds also in units of keys. `i` is the tile's first row in the block, `key` its
// first key.
template <class E>
KILN_APART void softmax_backward_tile(const BackwardScratch<E>& s, const Sizes& size, int64_t i, int64_t key,
                                      int64_t width, int64_t num_keys, __m512 scale) {
  for (int r = 0; r < kTileRows; r += E::kPerUnit) {
    for (int64_t j = 0; j < width; j += 32) {
      __m512 p[2][2], ds[2][2];
#pragma GCC unroll 2
      for (int u = 0; u < E::kPerUnit; ++u) {
        const __m512 log2_sum = _mm512_set1_ps(s.log2_sum[i + r + u]),
                     delta = _mm512_set1_ps(s.delta[i + r + u]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const int64_t at = (r + u) * kPanel + j + 16 * h;
          p[u][h] = exp2_masked(first_lanes(num_keys - key - j - 16 * h),
                                _mm512_fmsub_ps(_mm512_load_ps(s.scores + at), scale, log2_sum));
          ds[u][h] = _mm512_mul_ps(p[u][h], _mm512_sub_ps(_mm512_load_ps(s.grad_p + at), delta));
        }
        if constexpr (E::kPerUnit == 2)
          _mm512_store_si512(s.ds + (i + r + u) * s.ds_stride + (key + j) / 2,
                             (__m512i)_mm512_cvtne2ps_pbh(ds[u][1], ds[u][0]));
      }
      const int64_t at = (i + r) / E::kPerUnit * size.pair_stride + key + j;
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        if constexpr (E::kPerUnit == 2) {
          _mm512_store_si512(s.p_t + at + 16 * h, pair_rows(p[0][h], p[1][h]));
          _mm512_store_si512(s.ds_t + at + 16 * h, pair_rows(ds[0][h], ds[1][h]));
        } else {
          _mm512_store_ps(s.p_t + at + 16 * h, p[0][h]);
          _mm512_store_ps(s.ds_t + at + 16 * h, ds[0][h]);
        }
      }
    }
  }
}

// Computes p and ds of a block of query rows against all keys.
template <class E>
void softmax_backward_block(const AttentionBackward& args, const BackwardScratch<E>& s, const Sizes& size,
                            int64_t row, int64_t rows) {
  using Scalar = typename E::Scalar;
  const __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
  const uint32_t *keys = s.keys_t, *values = s.values_t;
  for (int64_t key = 0; key < args.num_keys; key += kPanel) {
    const int64_t width = smaller(kPanel, round_up(args.num_keys - key, 32));
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const SpreadRows q = spread_rows(static_cast<const Scalar*>(args.q) + (row + i) * args.q_stride,
                                       args.q_stride * static_cast<int64_t>(sizeof(Scalar)), rows - i);
      const SpreadRows g =
          spread_rows(static_cast<const Scalar*>(args.grad_out) + (row + i) * args.out_stride,
                      args.out_stride * static_cast<int64_t>(sizeof(Scalar)), rows - i);
      multiply<E>(width / 16, q, keys, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
        _mm512_store_ps(s.scores + r * kPanel + 16 * c, sum);
      });
      multiply<E>(width / 16, g, values, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
        _mm512_store_ps(s.grad_p + r * kPanel + 16 * c, sum);
      });
      softmax_backward_tile<E>(s, size, i, key, width, args.num_keys, scale);
    }
    keys += width * size.dim_units;
    values += width * size.dim_units;
  }
}

// sums (keys, dim) = or += transpose(rows of `a_t`) * b over the block's `units` of rows.
template <class E>
void add_transposed_product(const uint32_t* a_t, const uint32_t* b, int64_t units, bool first_block,
                            int64_t num_keys, const Sizes& size, float* sums) {
  const __mmask16 keep = first_block ? 0 : 0xffff;
  for_column_chunks(size.dim / 16, [&](int64_t first, int64_t count) KILN_LAMBDA {
    for (int64_t key = 0; key < num_keys; key += kTileRows) {
      float* out = sums + key * size.dim + first * 16;
      multiply<E>(count, AdjacentRows{a_t + key, size.pair_stride}, b + first * 16, size.dim, units,
                  [&](int r, int c, __m512 sum) KILN_LAMBDA {
                    float* at = out + r * size.dim + 16 * c;
                    _mm512_store_ps(at, _mm512_add_ps(sum, _mm512_maskz_load_ps(keep, at)));
                  });
    }
  });
}

// Writes sums (keys, dim) times a factor as rows of keys.
template <class Scalar>
void store_rows(const AttentionBackward& args, const float* sums, float factor, int64_t dim, void* rows) {
  for (int64_t i = 0; i < args.num_keys; ++i)
    for (int64_t d = 0; d < args.head_dim; d += 16)
      store_floats(static_cast<Scalar*>(rows) + i * args.grad_kv_stride + d, first_lanes(args.head_dim - d),
                   _mm512_mul_ps(_mm512_load_ps(sums + i * dim + d), _mm512_set1_ps(factor)));
}

template <class E>
void backward_head(const AttentionBackward& args, void* memory) {
  using Scalar = typename E::Scalar;
  const int64_t num_queries = args.num_queries, num_keys = args.num_keys, head_dim = args.head_dim;
  const Sizes size = sizes_of<E>({num_queries, num_keys, head_dim});
  Scratch scratch{static_cast<char*>(memory)};
  const BackwardScratch<E> s(scratch, size);
  pack_transposed<E>(args.k, args.k_stride, num_keys, head_dim, s.keys_t);
  pack_transposed<E>(args.v, args.v_stride, num_keys, head_dim, s.values_t);
  pack_rows<E>(args.k, args.k_stride, num_keys, size.keys, head_dim, s.keys);
  pack_rows<E>(args.q, args.q_stride, num_queries, size.queries, head_dim, s.queries);
  pack_rows<E>(args.grad_out, args.out_stride, num_queries, size.queries, head_dim, s.grads);
  const __m512 scale = _mm512_set1_ps(args.scale);

  for (int64_t row = 0; row < num_queries; row += kBackwardRows) {
    const int64_t rows = smaller(kBackwardRows, num_queries - row);
    row_terms<E>(args, row, rows, s);
    softmax_backward_block<E>(args, s, size, row, rows);
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const SpreadRows ds = spread_rows(s.ds + i * s.ds_stride, s.ds_stride * 4, rows - i);
      for_column_chunks(size.dim / 16, [&](int64_t first, int64_t count) KILN_LAMBDA {
        Scalar* out = static_cast<Scalar*>(args.grad_q) + (row + i) * args.grad_q_stride + first * 16;
        multiply<E>(count, ds, s.keys + first * 16, size.dim, size.key_units,
                    [&](int r, int c, __m512 sum) KILN_LAMBDA {
                      if (r < rows - i)
                        store_floats(out + r * args.grad_q_stride + 16 * c,
                                     first_lanes(head_dim - (first + c) * 16), _mm512_mul_ps(sum, scale));
                    });
      });
    }
    const int64_t units = (rows + E::kPerUnit - 1) / E::kPerUnit, first_unit = row / E::kPerUnit;
    add_transposed_product<E>(s.p_t, s.grads + first_unit * size.dim, units, row == 0, num_keys, size,
                              s.grad_v);
    add_transposed_product<E>(s.ds_t, s.queries + first_unit * size.dim, units, row == 0, num_keys, size,
                              s.grad_k);
  }
  const auto store = args.sum_type == AttentionType::kF32 ? store_rows<float> : store_rows<uint16_t>;
  store(args, s.grad_v, 1.0f, size.dim, args.grad_v);
  store(args, s.grad_k, args.scale, size.dim, args.grad_k);
}

}  // namespace

std::size_t avx512_backward_scratch(AttentionType type, const AttentionSizes& sizes) {
  if (type == AttentionType::kF32) return scratch_bytes<F32, BackwardScratch>(sizes);
  return has_matrix_tiles() ? tiles_backward_scratch(sizes) : scratch_bytes<BF16, BackwardScratch>(sizes);
}

void avx512_backward_head(AttentionType type, const AttentionBackward& args, void* scratch) {
  if (type == AttentionType::kF32)
    backward_head<F32>(args, scratch);
  else if (has_matrix_tiles())
    tiles_backward_head(args, scratch);
  else
    backward_head<BF16>(args, scratch);
}

}  // namespace kiln::ops::cpu
#endif
