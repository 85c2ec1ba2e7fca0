// Products of small matrices in AVX-512. Both element types are computed in "units" of 32 bits: one f32, or a
// pair of bf16 that vdpbf16ps multiplies and adds. A product C = A B broadcasts units of A and reads vectors
// of 16 units of B, so A is any row-major matrix as it lies in memory, while B is packed. Sums are f32,
// rounded once.
//
// Everything from here to the end of the including file, lambdas and instantiations included, is compiled for
// AVX-512; chosen_avx512() guards it. Nothing from a shared header may be instantiated after this include.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// The intrinsics themselves raise these false alarms.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2,prfchw")

namespace kiln::ops::cpu {
namespace {

#define KILN_INLINE inline __attribute__((always_inline))
#define KILN_APART __attribute__((noinline))  // so its constants take no registers from the products
#define KILN_LAMBDA __attribute__((always_inline))

constexpr int kTileRows = 6;     // rows of a register tile: 6 x 4 sums + 4 of B + 1 of A = 29 of 32 registers
constexpr int kTileVectors = 4;  // its columns, in vectors of 16

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

// Loads up to 16 elements as f32.
KILN_INLINE __m512 load_floats(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
KILN_INLINE __m512 load_floats(const uint16_t* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
KILN_INLINE void store_floats(float* p, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(p, mask, x); }
KILN_INLINE void store_floats(uint16_t* p, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

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

// Interleaves two rows, given as f32, in bf16: lane i = (row0[i], row1[i]).
KILN_INLINE __m512i pair_rows(__m512 row0, __m512 row1) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(row1, row0);  // 16 of row0, then 16 of row1
  const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(lanes, both);
}

// Loads a unit, or one bf16, from any address.
KILN_INLINE int load_unit(const void* p) {
  int unit;
  std::memcpy(&unit, p, sizeof unit);
  return unit;
}
KILN_INLINE short load_half(const void* p) {
  short half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

// Rows of A that lie apart, with k contiguous. Rows beyond the last repeat it; they are computed but never
// stored.
struct SpreadRows {
  static constexpr int kUnits = 1;
  const uint32_t* row[kTileRows];
  KILN_INLINE __m512i unit(int i, int64_t k, int) const {
    return _mm512_set1_epi32(static_cast<int>(row[i][k]));
  }
};
KILN_INLINE SpreadRows spread_rows(const void* base, int64_t stride_bytes, int64_t count) {
  SpreadRows rows;
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i)
    rows.row[i] = reinterpret_cast<const uint32_t*>(static_cast<const char*>(base) +
                                                    smaller(i, count - 1) * stride_bytes);
  return rows;
}

// Rows of A that are adjacent units, `k_stride` units from one k to the next: a transposed matrix.
struct AdjacentRows {
  static constexpr int kUnits = 1;
  const uint32_t* base;
  int64_t k_stride;
  KILN_INLINE __m512i unit(int i, int64_t k, int) const {
    return _mm512_set1_epi32(static_cast<int>(base[k * k_stride + i]));
  }
};

// Calls finish(row, vector, sum) for every vector of the tile A (6 rows) times B (k_units, 16 * V columns).
// Units are taken Rows::kUnits at a time, by which k_units must be divisible.
template <class E, int V, class Rows, class Finish>
KILN_INLINE void multiply_tile(const Rows& a, const uint32_t* b, int64_t b_stride, int64_t k_units,
                               Finish&& finish) {
  __m512 sum[kTileRows][V];
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t k = 0; k < k_units; k += Rows::kUnits)
#pragma GCC unroll 9
    for (int t = 0; t < Rows::kUnits; ++t) {
      __m512i columns[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) columns[j] = _mm512_load_si512(b + 16 * j);
#pragma GCC unroll 6
      for (int i = 0; i < kTileRows; ++i) {
        const __m512i unit = a.unit(i, k, t);
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

// multiply_tile for a number of vectors that is known only at run time.
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

// Calls body(first, count) for even chunks of `vectors` columns, each of at most 4.
template <class Body>
KILN_INLINE void for_column_chunks(int64_t vectors, Body&& body) {
  const int64_t chunks = (vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t first = vectors * c / chunks;
    body(first, vectors * (c + 1) / chunks - first);
  }
}

// Hands out 64-byte aligned pieces of the scratch. With a null base it only counts.
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

}  // namespace
}  // namespace kiln::ops::cpu
