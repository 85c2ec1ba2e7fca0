// Conversion to 8-bit floats with one scale per tensor. One pass finds the largest value, another writes both
// layouts that products read, rows and columns.
#include <cuda_fp8.h>

#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;            // rows and columns of a block
constexpr int kPack = 8;             // elements of a thread's access
constexpr float kSmallest = 1e-30f;  // a tensor of zeros has no scale of its own

// Returns the largest value of the block. Bits of non-negative floats are ordered like the floats, with NaN
// above all.
__device__ unsigned block_max(unsigned v) {
  __shared__ unsigned values[kThreads];
  values[threadIdx.x] = v;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < stride) {
      values[threadIdx.x] = max(values[threadIdx.x], values[threadIdx.x + stride]);
    }
  }
  return values[0];
}

template <class T, int N>
__global__ void largest_kernel(const T* values, size_t n, unsigned* partials) {
  unsigned largest = 0;
  const size_t first = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x,
               step = static_cast<size_t>(gridDim.x) * kThreads, num_packs = n / N;
  for (size_t i = first; i < num_packs; i += step) {
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(values + i * N);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      largest = max(largest, __float_as_uint(fabsf(widen(pack.values[k]))));
    }
  }
  if (first < n % N) {
    largest = max(largest, __float_as_uint(fabsf(widen(values[num_packs * N + first]))));
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = largest;
  }
}

// Computes the power of two that brings the largest value just below the format's.
__global__ void scale_kernel(const unsigned* partials, float format_largest, float* scale) {
  unsigned largest = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kFp8Partials; i += kThreads) {
    largest = max(largest, partials[i]);
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) {
    const float ratio = __fdiv_rn(__uint_as_float(largest), format_largest);
    const unsigned bits = __float_as_uint(fmaxf(ratio, kSmallest));
    *scale = ratio != ratio ? ratio : __uint_as_float((bits + 0x7fffff) & 0x7f800000);
  }
}

// A block's elements. The alignment is that of the packs in which threads write them.
struct alignas(16) Tile {
  uint8_t values[kTile][kTile];
};
static_assert(alignof(Tile) >= alignof(Pack<uint8_t, kPack>) && kTile % kPack == 0, "packs are aligned");

// `rows` and `columns` may be null. Grid: (tiles of columns, tiles of rows).
template <class T>
__global__ void convert_kernel(const T* values, size_t num_rows, size_t num_columns, const float* scale,
                               __nv_fp8_interpretation_t format, uint8_t* rows, uint8_t* columns) {
  __shared__ Tile tile;
  const size_t first_row = static_cast<size_t>(blockIdx.y) * kTile,
               first_column = static_cast<size_t>(blockIdx.x) * kTile;
  const float factor = __fdiv_rn(1.0f, *scale);
  constexpr int kPacksOfRow = kTile / kPack, kRowsAtOnce = kThreads / kPacksOfRow;
  const int in_row = static_cast<int>(threadIdx.x) % kPacksOfRow * kPack;
  for (int r = static_cast<int>(threadIdx.x) / kPacksOfRow; r < kTile; r += kRowsAtOnce) {
    const size_t row = first_row + r, column = first_column + in_row;
    if (row >= num_rows || column >= num_columns) {  // the number of columns is a multiple of kPack
      continue;
    }
    Pack<uint8_t, kPack> converted;
    constexpr int kLoad = 16 / sizeof(T) < kPack ? 16 / sizeof(T) : kPack;
#pragma unroll
    for (int k = 0; k < kPack; k += kLoad) {
      const auto pack = *reinterpret_cast<const Pack<T, kLoad>*>(values + row * num_columns + column + k);
#pragma unroll
      for (int i = 0; i < kLoad; ++i) {
        converted.values[k + i] = __nv_cvt_float_to_fp8(widen(pack.values[i]) * factor, __NV_NOSAT, format);
      }
    }
    if (rows != nullptr) {
      *reinterpret_cast<Pack<uint8_t, kPack>*>(rows + row * num_columns + column) = converted;
    }
    *reinterpret_cast<Pack<uint8_t, kPack>*>(&tile.values[r][in_row]) = converted;
  }
  if (columns == nullptr) {
    return;
  }
  __syncthreads();
  constexpr int kRowPack = 16;  // the number of rows is a multiple of it
  const int c = static_cast<int>(threadIdx.x) % kTile, r = static_cast<int>(threadIdx.x) / kTile * kRowPack;
  if (first_row + r >= num_rows || first_column + c >= num_columns) {
    return;
  }
  Pack<uint8_t, kRowPack> column;
#pragma unroll
  for (int k = 0; k < kRowPack; ++k) {
    column.values[k] = tile.values[r + k][c];
  }
  *reinterpret_cast<Pack<uint8_t, kRowPack>*>(columns + (first_column + c) * num_rows + first_row + r) =
      column;
}

static_assert(kThreads == kTile * (kTile / 16), "a thread writes 16 rows of one column");

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_fp8_scale(kiln::Dtype dtype, const void* values, size_t n, float format_largest,
                        unsigned* partials, float* scale, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kLoad = 16 / sizeof(T);
    const T* from = static_cast<const T*>(values);
    launch(is_aligned_for<kLoad>(from) ? largest_kernel<T, kLoad> : largest_kernel<T, 1>, dim3(kFp8Partials),
           dim3(kThreads), s, from, n, partials);
  });
  launch(scale_kernel, dim3(1), dim3(kThreads), s, partials, format_largest, scale);
  return last_error();
}

int kiln_cuda_fp8_convert(kiln::Dtype dtype, const void* values, size_t num_rows, size_t num_columns,
                          const float* scale, bool is_e5m2, void* rows, void* columns, void* stream) {
  const auto format = is_e5m2 ? __NV_E5M2 : __NV_E4M3;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    launch(convert_kernel<T>, dim3(blocks_for(num_columns, kTile), blocks_for(num_rows, kTile)),
           dim3(kThreads), static_cast<cudaStream_t>(stream), static_cast<const T*>(values), num_rows,
           num_columns, scale, format, static_cast<uint8_t*>(rows), static_cast<uint8_t*>(columns));
  });
  return last_error();
}
