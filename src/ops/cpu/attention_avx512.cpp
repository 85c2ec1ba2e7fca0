// Attention of one head in AVX-512. Both element types are computed in "units" of 32 bits: one f32, or a pair
// of bf16 that vdpbf16ps multiplies and adds. A product C = A B broadcasts units of A and reads vectors of 16
// units of B, so A is any row-major matrix as it lies in memory, while B is packed once per head: by
// `pack_transposed` where the contraction runs along a token's elements, by `pack_rows` where it runs over
// tokens. Sums are f32, rounded once.
#include <immintrin.h>

#include <cmath>

#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

// Everything below, lambdas and instantiations included, is compiled for AVX-512; attention_supported()
// guards it. Nothing from a shared header may be instantiated after this line.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KILN_AVX512_ATTENTION 1
// False alarms of the intrinsics themselves.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2")
#else
#define KILN_AVX512_ATTENTION 0
#endif

namespace kiln::ops::cpu {
#if KILN_AVX512_ATTENTION
namespace {

#define KILN_INLINE inline __attribute__((always_inline))
#define KILN_APART __attribute__((noinline))  // so that its constants take no registers from the products
#define KILN_LAMBDA __attribute__((always_inline))

constexpr int kTileRows = 6;     // rows of a register tile: 6 x 4 sums + 4 of B + 1 of A = 29 of 32 registers
constexpr int kTileVectors = 4;  // its columns, in vectors of 16
constexpr int kPanel = 64;       // keys of one packed panel
constexpr int kForwardRows = 24;   // query rows whose scores are held at once in forward
constexpr int kBackwardRows = 96;  // query rows whose probabilities are held at once in backward
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNoRow = 1e30f;  // log2_sum of a row that does not exist: its probabilities are 0

struct F32 {
  using Scalar = float;
  static constexpr int kPerUnit = 1;
  static KILN_INLINE __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

struct BF16 {
  using Scalar = uint16_t;
  static constexpr int kPerUnit = 2;
  static KILN_INLINE __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

KILN_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
KILN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KILN_INLINE __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// 2^x to f32 accuracy; lanes outside the mask are 0. NaN stays NaN.
KILN_INLINE __m512 exp2_masked(__mmask16 mask, __m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);  // [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(1.3264727e-3f);  // minimax, 9e-8
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6715130e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507336e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314700e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(mask, p, whole);
}

// Tokens lie too far apart for the processor to foresee; may point beyond the tensor.
constexpr int kPrefetchTokens = 16;
KILN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Up to 16 elements as f32.
KILN_INLINE __m512 load_floats(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
KILN_INLINE __m512 load_floats(const uint16_t* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
KILN_INLINE void store_floats(float* p, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(p, mask, x); }
KILN_INLINE void store_floats(uint16_t* p, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

// ---- packing ----

KILN_INLINE void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// (num_tokens, head_dim) -> panels of up to 64 tokens, each (head_dim units, tokens of the panel rounded up
// to 32).
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

// Interleaves the bf16 of two rows given as f32: lane i = (row0[i], row1[i]).
KILN_INLINE __m512i pair_rows(__m512 row0, __m512 row1) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(row1, row0);  // 16 of row0, then 16 of row1
  const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(lanes, both);
}

// (num_tokens, head_dim) -> (units of the padded tokens, head_dim rounded up to 16), zero beyond tokens and
// elements.
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

// ---- products ----

// Rows of A that lie apart, k contiguous. Rows beyond the last repeat it: computed, never stored.
struct SpreadRows {
  const uint32_t* row[kTileRows];
  KILN_INLINE __m512i unit(int i, int64_t k) const { return _mm512_set1_epi32(static_cast<int>(row[i][k])); }
};
KILN_INLINE SpreadRows spread_rows(const void* base, int64_t stride_bytes, int64_t count) {
  SpreadRows rows;
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i)
    rows.row[i] = reinterpret_cast<const uint32_t*>(static_cast<const char*>(base) +
                                                    smaller(i, count - 1) * stride_bytes);
  return rows;
}

// Rows of A that are adjacent units, k apart: a transposed matrix.
struct AdjacentRows {
  const uint32_t* base;
  int64_t k_stride;
  KILN_INLINE __m512i unit(int i, int64_t k) const {
    return _mm512_set1_epi32(static_cast<int>(base[k * k_stride + i]));
  }
};

// Calls finish(row, vector, sum) for every vector of the tile A (6 rows) times B (k_units, 16 * V columns).
template <class E, int V, class Rows, class Finish>
KILN_INLINE void multiply_tile(const Rows& a, const uint32_t* b, int64_t b_stride, int64_t k_units,
                               Finish&& finish) {
  __m512 sum[kTileRows][V];
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t k = 0; k < k_units; ++k) {
    __m512i columns[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) columns[j] = _mm512_load_si512(b + 16 * j);
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      const __m512i unit = a.unit(i, k);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[i][j] = E::multiply_add(sum[i][j], unit, columns[j]);
    }
    b += b_stride;
  }
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) finish(i, j, sum[i][j]);
}

// multiply_tile for a number of vectors known only now.
template <class E, class Rows, class Finish>
KILN_INLINE void multiply(int64_t vectors, const Rows& a, const uint32_t* b, int64_t b_stride,
                          int64_t k_units, Finish&& finish) {
  switch (vectors) {
    case 4:
      return multiply_tile<E, 4>(a, b, b_stride, k_units, finish);
    case 3:
      return multiply_tile<E, 3>(a, b, b_stride, k_units, finish);
    case 2:
      return multiply_tile<E, 2>(a, b, b_stride, k_units, finish);
    default:
      return multiply_tile<E, 1>(a, b, b_stride, k_units, finish);
  }
}

// Splits `vectors` columns into even chunks of at most 4: body(first, count).
template <class Body>
KILN_INLINE void for_column_chunks(int64_t vectors, Body&& body) {
  const int64_t chunks = (vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t first = vectors * c / chunks;
    body(first, vectors * (c + 1) / chunks - first);
  }
}

// ---- sizes ----

// Hands out 64-byte aligned pieces of the scratch; with a null base it only counts.
struct Scratch {
  char* base;
  std::size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += static_cast<std::size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return piece;
  }
};

struct Sizes {
  int64_t keys;         // rounded up to 32, a vector of bf16
  int64_t key_units;    // units along the keys
  int64_t dim_units;    // units along a token's elements
  int64_t dim;          // elements of a padded token
  int64_t pair_stride;  // units between rows of the probabilities; odd in cache lines, so that columns do not
                        // collide
};
template <class E>
KILN_INLINE Sizes sizes_of(int64_t num_tokens, int64_t head_dim) {
  const int64_t keys = round_up(num_tokens, 32);
  return {keys, keys / E::kPerUnit, head_dim / E::kPerUnit, round_up(head_dim, 16), round_up(keys, 64) + 16};
}

// ---- forward ----

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

// exp2 of one row of scores less its maximum, as units along the keys. Returns log2 of the sum; its inverse
// in `inverse`.
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
        float* tile = s.scores + i * size.keys + key;  // kForwardRows is whole tiles: repeated rows have room
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

// ---- backward ----

template <class E>
struct BackwardScratch {
  uint32_t *keys_t, *values_t;       // packed for products along a token's elements
  uint32_t *keys, *queries, *grads;  // packed for products over tokens
  uint32_t *p_t, *ds_t, *ds;         // of a block of query rows: in units of rows (_t) and of keys
  int64_t ds_stride;
  float *grad_k, *grad_v;   // (keys, dim): sums over the blocks
  float *log2_sum, *delta;  // of the block
  float *scores, *grad_p;   // of a tile
  BackwardScratch(Scratch& scratch, const Sizes& size) {
    keys_t = scratch.take<uint32_t>(size.keys * size.dim_units);
    values_t = scratch.take<uint32_t>(size.keys * size.dim_units);
    keys = scratch.take<uint32_t>(size.key_units * size.dim);
    queries = scratch.take<uint32_t>(size.key_units * size.dim);
    grads = scratch.take<uint32_t>(size.key_units * size.dim);
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

// delta = sum(grad_out * out) of each row (Dao et al. 2022, eq. 4), and the softmax sums; neutral beyond
// `rows`.
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

// From a tile of scores and of grad_p: p = exp2(scores - log2_sum), ds = p * (grad_p - delta), stored in
// units of rows and (ds) of keys. `i` is the tile's first row in the block, `key` its first key.
template <class E>
KILN_APART void softmax_backward_tile(const BackwardScratch<E>& s, const Sizes& size, int64_t i, int64_t key,
                                      int64_t width, int64_t num_tokens, __m512 scale) {
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
          p[u][h] = exp2_masked(first_lanes(num_tokens - key - j - 16 * h),
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

// p and ds of a block of query rows against all keys.
template <class E>
void softmax_backward_block(const AttentionBackward& args, const BackwardScratch<E>& s, const Sizes& size,
                            int64_t row, int64_t rows) {
  using Scalar = typename E::Scalar;
  const __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
  const uint32_t *keys = s.keys_t, *values = s.values_t;
  for (int64_t key = 0; key < args.num_tokens; key += kPanel) {
    const int64_t width = smaller(kPanel, round_up(args.num_tokens - key, 32));
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const SpreadRows q = spread_rows(static_cast<const Scalar*>(args.q) + (row + i) * args.qkv_stride,
                                       args.qkv_stride * static_cast<int64_t>(sizeof(Scalar)), rows - i);
      const SpreadRows g =
          spread_rows(static_cast<const Scalar*>(args.grad_out) + (row + i) * args.out_stride,
                      args.out_stride * static_cast<int64_t>(sizeof(Scalar)), rows - i);
      multiply<E>(width / 16, q, keys, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
        _mm512_store_ps(s.scores + r * kPanel + 16 * c, sum);
      });
      multiply<E>(width / 16, g, values, width, size.dim_units, [&](int r, int c, __m512 sum) KILN_LAMBDA {
        _mm512_store_ps(s.grad_p + r * kPanel + 16 * c, sum);
      });
      softmax_backward_tile<E>(s, size, i, key, width, args.num_tokens, scale);
    }
    keys += width * size.dim_units;
    values += width * size.dim_units;
  }
}

// sums (keys, dim) (+)= transpose(rows of `a_t`) * b over the block's `units` of rows.
template <class E>
void add_transposed_product(const uint32_t* a_t, const uint32_t* b, int64_t units, bool first_block,
                            int64_t num_tokens, const Sizes& size, float* sums) {
  const __mmask16 keep = first_block ? 0 : 0xffff;
  for_column_chunks(size.dim / 16, [&](int64_t first, int64_t count) KILN_LAMBDA {
    for (int64_t key = 0; key < num_tokens; key += kTileRows) {
      float* out = sums + key * size.dim + first * 16;
      multiply<E>(count, AdjacentRows{a_t + key, size.pair_stride}, b + first * 16, size.dim, units,
                  [&](int r, int c, __m512 sum) KILN_LAMBDA {
                    float* at = out + r * size.dim + 16 * c;
                    _mm512_store_ps(at, _mm512_add_ps(sum, _mm512_maskz_load_ps(keep, at)));
                  });
    }
  });
}

template <class E>
void store_rows(const float* sums, float factor, int64_t num_tokens, int64_t head_dim, int64_t dim,
                void* rows, int64_t stride) {
  for (int64_t i = 0; i < num_tokens; ++i)
    for (int64_t d = 0; d < head_dim; d += 16)
      store_floats(static_cast<typename E::Scalar*>(rows) + i * stride + d, first_lanes(head_dim - d),
                   _mm512_mul_ps(_mm512_load_ps(sums + i * dim + d), _mm512_set1_ps(factor)));
}

template <class E>
void backward_head(const AttentionBackward& args, void* memory) {
  using Scalar = typename E::Scalar;
  const int64_t num_tokens = args.num_tokens, head_dim = args.head_dim;
  const Sizes size = sizes_of<E>(num_tokens, head_dim);
  Scratch scratch{static_cast<char*>(memory)};
  const BackwardScratch<E> s(scratch, size);
  pack_transposed<E>(args.k, args.qkv_stride, num_tokens, head_dim, s.keys_t);
  pack_transposed<E>(args.v, args.qkv_stride, num_tokens, head_dim, s.values_t);
  pack_rows<E>(args.k, args.qkv_stride, num_tokens, size.keys, head_dim, s.keys);
  pack_rows<E>(args.q, args.qkv_stride, num_tokens, size.keys, head_dim, s.queries);
  pack_rows<E>(args.grad_out, args.out_stride, num_tokens, size.keys, head_dim, s.grads);
  const __m512 scale = _mm512_set1_ps(args.scale);

  for (int64_t row = 0; row < num_tokens; row += kBackwardRows) {
    const int64_t rows = smaller(kBackwardRows, num_tokens - row);
    row_terms<E>(args, row, rows, s);
    softmax_backward_block<E>(args, s, size, row, rows);
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const SpreadRows ds = spread_rows(s.ds + i * s.ds_stride, s.ds_stride * 4, rows - i);
      for_column_chunks(size.dim / 16, [&](int64_t first, int64_t count) KILN_LAMBDA {
        Scalar* out = static_cast<Scalar*>(args.grad_q) + (row + i) * args.qkv_stride + first * 16;
        multiply<E>(count, ds, s.keys + first * 16, size.dim, size.key_units,
                    [&](int r, int c, __m512 sum) KILN_LAMBDA {
                      if (r < rows - i)
                        store_floats(out + r * args.qkv_stride + 16 * c,
                                     first_lanes(head_dim - (first + c) * 16), _mm512_mul_ps(sum, scale));
                    });
      });
    }
    const int64_t units = (rows + E::kPerUnit - 1) / E::kPerUnit, first_unit = row / E::kPerUnit;
    add_transposed_product<E>(s.p_t, s.grads + first_unit * size.dim, units, row == 0, num_tokens, size,
                              s.grad_v);
    add_transposed_product<E>(s.ds_t, s.queries + first_unit * size.dim, units, row == 0, num_tokens, size,
                              s.grad_k);
  }
  store_rows<E>(s.grad_v, 1.0f, num_tokens, head_dim, size.dim, args.grad_v, args.qkv_stride);
  store_rows<E>(s.grad_k, args.scale, num_tokens, head_dim, size.dim, args.grad_k, args.qkv_stride);
}

template <class E, template <class> class Pieces>
std::size_t scratch_bytes(int64_t num_tokens, int64_t head_dim) {
  Scratch scratch{nullptr};
  Pieces<E>(scratch, sizes_of<E>(num_tokens, head_dim));
  return scratch.used;
}

}  // namespace

#pragma GCC pop_options

bool attention_supported(AttentionType type, int64_t head_dim) {
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
  return chosen_avx512() && (type == AttentionType::kF32 || (has_bf16 && head_dim % 2 == 0));
}

std::size_t attention_forward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim) {
  return type == AttentionType::kF32 ? scratch_bytes<F32, ForwardScratch>(num_tokens, head_dim)
                                     : scratch_bytes<BF16, ForwardScratch>(num_tokens, head_dim);
}

std::size_t attention_backward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim) {
  return type == AttentionType::kF32 ? scratch_bytes<F32, BackwardScratch>(num_tokens, head_dim)
                                     : scratch_bytes<BF16, BackwardScratch>(num_tokens, head_dim);
}

void attention_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin,
                            int64_t row_end, void* scratch) {
  if (type == AttentionType::kF32)
    forward_head<F32>(args, row_begin, row_end, scratch);
  else
    forward_head<BF16>(args, row_begin, row_end, scratch);
}

void attention_backward_head(AttentionType type, const AttentionBackward& args, void* scratch) {
  if (type == AttentionType::kF32)
    backward_head<F32>(args, scratch);
  else
    backward_head<BF16>(args, scratch);
}

#else  // no AVX-512 compiler: ATen serves everything

bool attention_supported(AttentionType, int64_t) { return false; }
std::size_t attention_forward_scratch(AttentionType, int64_t, int64_t) { return 0; }
std::size_t attention_backward_scratch(AttentionType, int64_t, int64_t) { return 0; }
void attention_forward_head(AttentionType, const AttentionForward&, int64_t, int64_t, void*) {}
void attention_backward_head(AttentionType, const AttentionBackward&, void*) {}

#endif
}  // namespace kiln::ops::cpu
