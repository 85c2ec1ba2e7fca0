// Products of small f32 matrices that lie in the caches, in register tiles, transposition of blocks, and a
// head's tokens as such matrices. For the instruction set being compiled.
#if defined(KILN_OPS_CPU_SMALL_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KILN_OPS_CPU_SMALL_PRODUCTS_INL_H_
#undef KILN_OPS_CPU_SMALL_PRODUCTS_INL_H_
#else
#define KILN_OPS_CPU_SMALL_PRODUCTS_INL_H_
#endif
#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// A register tile. With AVX-512, 6 x 4 sums, 4 vectors of the right matrix and one broadcast of the left take
// 29 of 32 registers. With AVX2, 6 x 2 sums take 15 of 16 in all, and 4 x 3, where columns are an odd number
// of vectors, 16.
constexpr size_t kTileVectors = kLanes >= 16 ? 4 : 2;
constexpr size_t tile_rows(size_t vectors) { return vectors <= kTileVectors ? 6 : 4; }

// Element (i, k) is values[i * row + k * inner]: a row-major matrix or a transposed one.
struct LeftMatrix {
  const float* values;
  size_t row, inner;
};

// A row-major matrix whose rows are whole vectors.
struct RowMajor {
  float* values;
  size_t stride;
};

// Computes result (kRows, kVectors * kLanes) = left (kRows, depth) @ right (depth, ..), or adds that to it.
template <size_t kRows, size_t kVectors>
HWY_INLINE void multiply_tile(const float* HWY_RESTRICT left, size_t row, size_t inner,
                              const float* HWY_RESTRICT right, size_t right_stride, size_t depth, bool add,
                              float* HWY_RESTRICT result, size_t result_stride) {
  Vec sums[kRows][kVectors];
  HWY_UNROLL(6)
  for (size_t i = 0; i < kRows; ++i) {
    HWY_UNROLL(4)
    for (size_t j = 0; j < kVectors; ++j)
      sums[i][j] = add ? load(result + i * result_stride + j * kLanes) : set(0);
  }
  for (size_t k = 0; k < depth; ++k, left += inner, right += right_stride) {
    Vec columns[kVectors];
    HWY_UNROLL(4)
    for (size_t j = 0; j < kVectors; ++j) columns[j] = load(right + j * kLanes);
    HWY_UNROLL(6)
    for (size_t i = 0; i < kRows; ++i) {
      const Vec element = set(left[i * row]);
      HWY_UNROLL(4)
      for (size_t j = 0; j < kVectors; ++j) sums[i][j] = hn::MulAdd(element, columns[j], sums[i][j]);
    }
  }
  HWY_UNROLL(6)
  for (size_t i = 0; i < kRows; ++i) {
    HWY_UNROLL(4)
    for (size_t j = 0; j < kVectors; ++j) store(sums[i][j], result + i * result_stride + j * kLanes);
  }
}

template <size_t kVectors>
HWY_INLINE void multiply_rows(size_t rows, const float* left, size_t row, size_t inner, const float* right,
                              size_t right_stride, size_t depth, bool add, float* result,
                              size_t result_stride) {
  const auto tile = [&](auto count) HWY_ATTR {
    multiply_tile<decltype(count)::value, kVectors>(left, row, inner, right, right_stride, depth, add, result,
                                                    result_stride);
  };
  constexpr size_t kMost = tile_rows(kVectors);
  switch (rows) {
    case 1:
      return tile(std::integral_constant<size_t, 1>());
    case 2:
      return tile(std::integral_constant<size_t, 2>());
    case 3:
      return tile(std::integral_constant<size_t, 3>());
    case 4:
      return tile(std::integral_constant<size_t, 4>());
    case 5:
      return tile(std::integral_constant<size_t, std::min<size_t>(5, kMost)>());
    default:
      return tile(std::integral_constant<size_t, kMost>());
  }
}

// Calls body(first, count) for even pieces of [0, n), none larger than `most`.
template <class Body>
HWY_INLINE void for_even_pieces(size_t n, size_t most, const Body& body) {
  const size_t pieces = (n + most - 1) / most;
  for (size_t p = 0; p < pieces; ++p) {
    const size_t first = n * p / pieces;
    body(first, n * (p + 1) / pieces - first);
  }
}

// Computes result (rows, vectors * kLanes) = left (rows, depth) @ right (depth, vectors * kLanes), or adds
// that to it. Each element is one sum in the order of depth, whatever the tiles.
inline void multiply(const LeftMatrix& left, RowMajor right, RowMajor result, size_t rows, size_t vectors,
                     size_t depth, bool add = false) {
  const auto columns = [&](size_t first, auto width) HWY_ATTR {
    constexpr size_t kVectors = decltype(width)::value;
    for_even_pieces(rows, tile_rows(kVectors), [&](size_t top, size_t height) HWY_ATTR {
      multiply_rows<kVectors>(height, left.values + top * left.row, left.row, left.inner,
                              right.values + first * kLanes, right.stride, depth, add,
                              result.values + top * result.stride + first * kLanes, result.stride);
    });
  };
  const bool is_odd = kTileVectors == 2 && vectors % 2 == 1 && vectors > 1;
  if (is_odd) columns(0, std::integral_constant<size_t, 3>());
  const size_t begin = is_odd ? 3 : 0;
  for_even_pieces(vectors - begin, kTileVectors, [&](size_t first, size_t count) HWY_ATTR {
    first += begin;
    if (count == 1) return columns(first, std::integral_constant<size_t, 1>());
    if constexpr (kTileVectors > 2) {
      if (count == 3) return columns(first, std::integral_constant<size_t, 3>());
      if (count == 4) return columns(first, std::integral_constant<size_t, 4>());
    }
    return columns(first, std::integral_constant<size_t, 2>());
  });
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void transpose_lanes(const float* from, size_t from_stride, float* to, size_t to_stride) {
  for (size_t j = 0; j < 4; ++j) to[j * to_stride] = from[j];
  static_cast<void>(from_stride);
}
#else
// Loads four elements of each of several rows; the rows are four apart.
template <class D>
HWY_INLINE hn::Vec<D> every_fourth_row(D d, const float* from, size_t stride) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, every_fourth_row(half, from + hn::MaxLanes(half) * stride, stride),
                       every_fourth_row(half, from, stride));
  }
}

// Transposes four columns of kLanes rows into four rows of kLanes columns.
HWY_INLINE void transpose_lanes(const float* from, size_t from_stride, float* to, size_t to_stride) {
  const F32 d;
  const Vec row0 = every_fourth_row(d, from, from_stride),
            row1 = every_fourth_row(d, from + from_stride, from_stride),
            row2 = every_fourth_row(d, from + 2 * from_stride, from_stride),
            row3 = every_fourth_row(d, from + 3 * from_stride, from_stride);
  const Vec even_low = hn::InterleaveLower(d, row0, row2), odd_low = hn::InterleaveLower(d, row1, row3),
            even_high = hn::InterleaveUpper(d, row0, row2), odd_high = hn::InterleaveUpper(d, row1, row3);
  store(hn::InterleaveLower(d, even_low, odd_low), to);
  store(hn::InterleaveUpper(d, even_low, odd_low), to + to_stride);
  store(hn::InterleaveLower(d, even_high, odd_high), to + 2 * to_stride);
  store(hn::InterleaveUpper(d, even_high, odd_high), to + 3 * to_stride);
}
#endif

// to (width, rows) = from (rows, width)^T. rows is a multiple of kLanes, width of four.
inline void transpose(RowMajor from, size_t rows, size_t width, RowMajor to) {
  for (size_t i = 0; i < rows; i += kLanes)
    for (size_t j = 0; j < width; j += 4)
      transpose_lanes(from.values + i * from.stride + j, from.stride, to.values + j * to.stride + i,
                      to.stride);
}

HWY_INLINE size_t whole_vectors(size_t n) { return (n + kLanes - 1) / kLanes; }
HWY_INLINE size_t row_vectors(size_t head_dim) {  // transposition takes four columns
  constexpr size_t kColumns = kLanes < 4 ? 4 : kLanes;
  return (head_dim + kColumns - 1) / kColumns * kColumns / kLanes;
}

// Hands out pieces of the scratch.
struct Pieces {
  float* next;
  RowMajor take(size_t rows, size_t width) {
    const RowMajor piece{next, width};
    next += rows * width;
    return piece;
  }
};

// Writes tokens [first, first + count) times `factor` as f32, with zeros after them up to `rows` and in
// partial vectors.
template <class T>
HWY_INLINE void widen_rows(const HeadTokens& tokens, size_t first, size_t count, size_t rows, size_t head_dim,
                           float factor, RowMajor to) {
  const Vec scale = set(factor);
  for (size_t t = 0; t < count; ++t) {
    const T* from = static_cast<const T*>(tokens.data) + (first + t) * tokens.stride;
    float* row = to.values + t * to.stride;
    for_each_vector(head_dim, [=](size_t j, size_t lanes)
                                  HWY_ATTR { store(hn::Mul(load(from + j, lanes), scale), row + j); });
  }
  std::fill_n(to.values + count * to.stride, (rows - count) * to.stride, 0.0f);
}

template <class T>
HWY_INLINE void narrow_rows(RowMajor from, size_t count, size_t head_dim, float factor, const HeadTokens& to,
                            size_t first) {
  const Vec scale = set(factor);
  for (size_t t = 0; t < count; ++t) {
    const float* row = from.values + t * from.stride;
    T* out = static_cast<T*>(to.data) + (first + t) * to.stride;
    for_each_vector(head_dim, [=](size_t j, size_t lanes)
                                  HWY_ATTR { store(hn::Mul(load(row + j), scale), out + j, lanes); });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#endif
