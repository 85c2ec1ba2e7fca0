#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

#if KILN_AVX512_KERNELS
#include "ops/cpu/attention_tiles-inl.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kKeys = 128;   // keys whose gradients of scores are held at once in backward
constexpr float kNoRow = 1e30f;  // log2_sum of a row that does not exist: its probabilities are 0

struct TileSizes {
  int64_t tokens;         // columns of scores, rounded up to 32: keys in forward, queries in backward
  int64_t depth;          // elements of a token, rounded up to 32: for contractions along them
  int64_t dim;            // elements of a token, rounded up to 16: columns of results
  int64_t score_stride;   // in floats
  int64_t weight_stride;  // in bf16
  TileSizes(int64_t num_tokens, int64_t head_dim)
      : tokens(round_up(num_tokens, kBlock)),
        depth(round_up(head_dim, kTileDepth)),
        dim(round_up(head_dim, kTileSide)),
        score_stride(odd_lines(tokens, 16)),
        weight_stride(odd_lines(tokens, 32)) {}
};

struct TilesForwardScratch {
  uint32_t *keys, *values;  // panels along elements; pairs of tokens
  uint16_t *queries, *weights;
  float *scores, *inverse_sum;
  TilesForwardScratch(Scratch& scratch, const TileSizes& size) {
    keys = scratch.take<uint32_t>(size.tokens * size.depth / 2);
    values = scratch.take<uint32_t>(size.tokens / 2 * size.dim);
    queries = scratch.take<uint16_t>(kBlock * size.depth);
    weights = scratch.take<uint16_t>(kBlock * size.weight_stride);
    scores = scratch.take<float>(kBlock * size.score_stride);
    inverse_sum = scratch.take<float>(kBlock);
  }
};

// Writes exp2 of scale * score, less the maximum, for one row. Returns log2 of the sum, and its inverse in
// `inverse`.
KILN_APART float softmax_row(const float* scores, int64_t num_keys, int64_t padded, float scale,
                             uint16_t* out, float* inverse) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  int64_t j = 0;
  for (; j + 16 <= num_keys; j += 16) top = _mm512_max_ps(top, _mm512_load_ps(scores + j));
  if (j < num_keys) top = _mm512_mask_max_ps(top, first_lanes(num_keys - j), top, _mm512_load_ps(scores + j));
  const float maximum = scale * _mm512_reduce_max_ps(top);
  const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(maximum);
  __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
  for (j = 0; j < padded; j += 32) {
    const __m512 p0 =
        exp2_masked(first_lanes(num_keys - j), _mm512_fmsub_ps(_mm512_load_ps(scores + j), factor, shift));
    const __m512 p1 = exp2_masked(first_lanes(num_keys - j - 16),
                                  _mm512_fmsub_ps(_mm512_load_ps(scores + j + 16), factor, shift));
    sum0 = _mm512_add_ps(sum0, p0);
    sum1 = _mm512_add_ps(sum1, p1);
    _mm512_store_si512(out + j, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
  *inverse = 1.0f / sum;
  return maximum + __builtin_log2f(sum);
}

// Computes 32 rows of scores: `rows` (32, depth) times panels of all tokens.
KILN_APART void multiply_panels(const uint16_t* rows, const uint32_t* panels, const TileSizes& size,
                                float* scores) {
  for (int64_t token = 0; token < size.tokens; token += kBlock)
    multiply_tiles<2, 2>(rows, 2 * size.depth, panels + token * (size.depth / 2), 4 * kBlock,
                         size.depth / kTileDepth, scores + token, 4 * size.score_stride);
}

struct TilesBackwardScratch {
  uint32_t *queries_t, *grads_t;  // panels along elements
  uint32_t *queries, *grads;      // pairs of tokens
  uint16_t *keys, *values;        // a block of rows
  uint32_t* keys_t;               // (dim, pairs of the held keys)
  float *scores, *grad_p;         // (keys of a block, queries)
  uint16_t *p, *ds;               // like scores and grad_p, in bf16
  uint32_t* ds_units;             // panels of queries, in pairs of the held keys
  float *grad_q_t, *log2_sum, *delta;
  TilesBackwardScratch(Scratch& scratch, const TileSizes& size) {
    queries_t = scratch.take<uint32_t>(size.tokens * size.depth / 2);
    grads_t = scratch.take<uint32_t>(size.tokens * size.depth / 2);
    queries = scratch.take<uint32_t>(size.tokens / 2 * size.dim);
    grads = scratch.take<uint32_t>(size.tokens / 2 * size.dim);
    keys = scratch.take<uint16_t>(kBlock * size.depth);
    values = scratch.take<uint16_t>(kBlock * size.depth);
    keys_t = scratch.take<uint32_t>(size.dim * kKeys / 2);
    scores = scratch.take<float>(kBlock * size.score_stride);
    grad_p = scratch.take<float>(kBlock * size.score_stride);
    p = scratch.take<uint16_t>(kBlock * size.weight_stride);
    ds = scratch.take<uint16_t>(kBlock * size.weight_stride);
    ds_units = scratch.take<uint32_t>(size.tokens * kKeys / 2);
    grad_q_t = scratch.take<float>(size.dim * size.score_stride);
    log2_sum = scratch.take<float>(size.tokens);
    delta = scratch.take<float>(size.tokens);
  }
};

template <class Pieces>
std::size_t scratch_bytes_of(const TileSizes& size) {
  Scratch scratch{nullptr};
  Pieces(scratch, size);
  return scratch.used;
}

// Computes delta = sum(grad_out * out) of each query (Dao et al. 2022, eq. 4), and copies the softmax sums.
void query_terms(const AttentionBackward& args, const TileSizes& size, const TilesBackwardScratch& s) {
  for (int64_t i = 0; i < size.tokens; ++i) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t d = 0; i < args.num_queries && d < args.head_dim; d += 16) {
      const __mmask16 mask = first_lanes(args.head_dim - d);
      const int64_t at = i * args.out_stride + d;
      sum = _mm512_fmadd_ps(load_floats(static_cast<const uint16_t*>(args.out) + at, mask),
                            load_floats(static_cast<const uint16_t*>(args.grad_out) + at, mask), sum);
    }
    s.delta[i] = _mm512_reduce_add_ps(sum);
    s.log2_sum[i] = i < args.num_queries ? args.log2_sum[i] : kNoRow;
  }
}

// Packs the keys from `first` on into (dim, pairs of keys), with zeros beyond the last.
void transpose_keys(const AttentionBackward& args, int64_t first, const TileSizes& size, uint32_t* out) {
  const auto* rows = static_cast<const uint16_t*>(args.k);
  const auto load = [&](int64_t token, int64_t d) KILN_LAMBDA {
    const __mmask16 mask = token < args.num_keys ? first_lanes(args.head_dim - d) : 0;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, rows + token * args.k_stride + d));
  };
  for (int64_t d = 0; d < size.dim; d += 16)
    for (int64_t pair = 0; pair < kKeys / 2; pair += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t token = first + 2 * (pair + i);
        block[i] = _mm512_or_si512(load(token, d), _mm512_slli_epi32(load(token + 1, d), 16));
      }
      transpose_16x16(block);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + (d + i) * (kKeys / 2) + pair, block[i]);
    }
}

// Computes p = exp2(scores - log2_sum) and ds = p * (grad_p - delta) * scale for a block of keys. Both are
// stored as rows of keys, and ds also in pairs of keys. `pair` is the block's first pair among the held keys.
KILN_APART void weigh_block(const AttentionBackward& args, int64_t num_keys, int64_t pair,
                            const TileSizes& size, const TilesBackwardScratch& s) {
  const __m512 scale = _mm512_set1_ps(args.scale), scale_log2 = _mm512_set1_ps(args.scale * kLog2E);
  for (int64_t key = 0; key < kBlock; key += 2)
    for (int64_t query = 0; query < size.tokens; query += 32) {
      __m512 p[2][2], ds[2][2];  // key, half
#pragma GCC unroll 2
      for (int row = 0; row < 2; ++row) {
        const __mmask16 exists = key + row < num_keys ? 0xffff : 0;
        const int64_t at = (key + row) * size.score_stride + query;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m512 sum = _mm512_load_ps(s.log2_sum + query + 16 * half),
                       delta = _mm512_load_ps(s.delta + query + 16 * half);
          p[row][half] = exp2_masked(
              exists, _mm512_fmsub_ps(_mm512_load_ps(s.scores + at + 16 * half), scale_log2, sum));
          ds[row][half] = _mm512_mul_ps(_mm512_mul_ps(p[row][half], scale),
                                        _mm512_sub_ps(_mm512_load_ps(s.grad_p + at + 16 * half), delta));
        }
        const int64_t to = (key + row) * size.weight_stride + query;
        _mm512_store_si512(s.p + to, (__m512i)_mm512_cvtne2ps_pbh(p[row][1], p[row][0]));
        _mm512_store_si512(s.ds + to, (__m512i)_mm512_cvtne2ps_pbh(ds[row][1], ds[row][0]));
      }
      uint32_t* units = s.ds_units + query * (kKeys / 2) + (pair + key / 2) * kBlock;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        _mm512_store_si512(units + 16 * half, pair_rows(ds[0][half], ds[1][half]));
    }
}

// Adds keys^T ds^T of the held keys to grad_q^T.
KILN_APART void add_grad_q(int64_t num_keys, const TileSizes& size, const TilesBackwardScratch& s) {
  const int64_t depth = num_keys / kTileDepth;
  for (int64_t query = 0; query < size.tokens; query += kBlock) {
    const uint32_t* units = s.ds_units + query * (kKeys / 2);
    for (int64_t d = 0; d < size.dim; d += 32) {
      const uint32_t* rows = s.keys_t + d * (kKeys / 2);
      float* sums = s.grad_q_t + d * size.score_stride + query;
      if (size.dim - d > kTileSide)
        multiply_tiles<2, 2, true>(rows, 2 * kKeys, units, 4 * kBlock, depth, sums, 4 * size.score_stride);
      else
        multiply_tiles<1, 2, true>(rows, 2 * kKeys, units, 4 * kBlock, depth, sums, 4 * size.score_stride);
    }
  }
}

void store_grad_q(const AttentionBackward& args, const TileSizes& size, const TilesBackwardScratch& s) {
  for (int64_t query = 0; query < args.num_queries; query += 16)
    for (int64_t d = 0; d < args.head_dim; d += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = _mm512_load_si512(s.grad_q_t + (d + i) * size.score_stride + query);
      transpose_16x16(block);
      for (int64_t i = 0; i < smaller(16, args.num_queries - query); ++i)
        store_floats(static_cast<uint16_t*>(args.grad_q) + (query + i) * args.grad_q_stride + d,
                     first_lanes(args.head_dim - d), _mm512_castsi512_ps(block[i]));
    }
}

// Sums over the queries are stored as `Sum`.
template <class Sum>
void backward_of(const AttentionBackward& args, void* memory) {
  const int64_t num_queries = args.num_queries, num_keys = args.num_keys, head_dim = args.head_dim;
  const TileSizes size(num_queries, head_dim);
  Scratch scratch{static_cast<char*>(memory)};
  const TilesBackwardScratch s(scratch, size);
  const auto as_is = [](int64_t, __m512 sum) KILN_LAMBDA { return sum; };
  const TilesInUse tiles;
  pack_panels(static_cast<const uint16_t*>(args.q), args.q_stride, num_queries, head_dim, size.depth / 2,
              s.queries_t);
  pack_panels(static_cast<const uint16_t*>(args.grad_out), args.out_stride, num_queries, head_dim,
              size.depth / 2, s.grads_t);
  pack_rows<BF16>(args.q, args.q_stride, num_queries, size.tokens, head_dim, s.queries);
  pack_rows<BF16>(args.grad_out, args.out_stride, num_queries, size.tokens, head_dim, s.grads);
  query_terms(args, size, s);
  for (int64_t i = 0; i < size.dim * size.score_stride; i += 16)
    _mm512_store_ps(s.grad_q_t + i, _mm512_setzero_ps());

  const int64_t padded_keys = round_up(num_keys, kBlock);
  for (int64_t held = 0; held < padded_keys; held += kKeys) {
    const int64_t num_held = smaller(kKeys, padded_keys - held);
    transpose_keys(args, held, size, s.keys_t);
    for (int64_t key = held; key < held + num_held; key += kBlock) {
      const int64_t keys = smaller(kBlock, num_keys - key);
      copy_block(static_cast<const uint16_t*>(args.k) + key * args.k_stride, args.k_stride, keys, head_dim,
                 size.depth, s.keys);
      copy_block(static_cast<const uint16_t*>(args.v) + key * args.v_stride, args.v_stride, keys, head_dim,
                 size.depth, s.values);
      multiply_panels(s.keys, s.queries_t, size, s.scores);
      multiply_panels(s.values, s.grads_t, size, s.grad_p);
      weigh_block(args, keys, (key - held) / 2, size, s);
      store_product(s.p, size.weight_stride, s.grads, size.dim, size.tokens / kTileDepth,
                    static_cast<Sum*>(args.grad_v) + key * args.grad_kv_stride, args.grad_kv_stride, keys,
                    head_dim, as_is);
      store_product(s.ds, size.weight_stride, s.queries, size.dim, size.tokens / kTileDepth,
                    static_cast<Sum*>(args.grad_k) + key * args.grad_kv_stride, args.grad_kv_stride, keys,
                    head_dim, as_is);
    }
    add_grad_q(num_held, size, s);
  }
  store_grad_q(args, size, s);
}

}  // namespace

std::size_t tiles_forward_scratch(const AttentionSizes& sizes) {
  return scratch_bytes_of<TilesForwardScratch>({sizes.num_keys, sizes.head_dim});
}

std::size_t tiles_backward_scratch(const AttentionSizes& sizes) {
  return scratch_bytes_of<TilesBackwardScratch>({sizes.num_queries, sizes.head_dim});
}

void tiles_forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* memory) {
  const int64_t num_keys = args.num_keys, head_dim = args.head_dim;
  const TileSizes size(num_keys, head_dim);
  Scratch scratch{static_cast<char*>(memory)};
  const TilesForwardScratch s(scratch, size);
  const TilesInUse tiles;
  pack_panels(static_cast<const uint16_t*>(args.k), args.k_stride, num_keys, head_dim, size.depth / 2,
              s.keys);
  pack_rows<BF16>(args.v, args.v_stride, num_keys, size.tokens, head_dim, s.values);
  for (int64_t row = row_begin; row < row_end; row += kBlock) {
    const int64_t rows = smaller(kBlock, row_end - row);
    copy_block(static_cast<const uint16_t*>(args.q) + row * args.q_stride, args.q_stride, rows, head_dim,
               size.depth, s.queries);
    multiply_panels(s.queries, s.keys, size, s.scores);
    for (int64_t i = 0; i < rows; ++i)
      args.log2_sum[row + i] =
          softmax_row(s.scores + i * size.score_stride, num_keys, size.tokens, args.scale * kLog2E,
                      s.weights + i * size.weight_stride, s.inverse_sum + i);
    store_product(s.weights, size.weight_stride, s.values, size.dim, size.tokens / kTileDepth,
                  static_cast<uint16_t*>(args.out) + row * args.out_stride, args.out_stride, rows, head_dim,
                  [&](int64_t i, __m512 sum)
                      KILN_LAMBDA { return _mm512_mul_ps(sum, _mm512_set1_ps(s.inverse_sum[i])); });
  }
}

void tiles_backward_head(const AttentionBackward& args, void* memory) {
  args.sum_type == AttentionType::kF32 ? backward_of<float>(args, memory)
                                       : backward_of<uint16_t>(args, memory);
}

}  // namespace kiln::ops::cpu
#endif
