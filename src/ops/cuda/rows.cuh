// Kernels on rows of tokens against modulation rows (B, D). A block has `kRowsPerBlock` or so consecutive
// rows of one batch, and a thread the same 8 columns of each. A thread keeps what it reads in registers; it
// reads 16 bytes at a time, several rows at once. Modulation is read once a block, and column sums need no
// second pass. Sums over a row go through the block in fixed order.
#pragma once
#include <type_traits>

#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {

inline constexpr int kRowElements = 8;  // columns of a thread
inline constexpr int kMostRowThreads = 512;
inline constexpr int kMostRowWarps = kMostRowThreads / 32;
static_assert(kWidestRow == kRowElements * kMostRowThreads, "kernels.h tells callers");

inline unsigned row_threads(size_t width) { return blocks_for(width, 32 * kRowElements) * 32; }

// The rows of this block (`per_block`, fewer at the end of a batch) and the columns of this thread. Grid:
// batch times the blocks of a batch.
struct RowPosition {
  size_t batch, first_row, end_row, column;  // rows count over all batches
  int count;                                 // existing columns of this thread: 0 to 8

  __device__ RowPosition(size_t rows_per_batch, size_t per_block, size_t width) {
    const size_t blocks = (rows_per_batch + per_block - 1) / per_block;
    batch = blockIdx.x / blocks;
    first_row = batch * rows_per_batch + blockIdx.x % blocks * per_block;
    end_row = min(first_row + per_block, (batch + 1) * rows_per_batch);
    column = static_cast<size_t>(threadIdx.x) * kRowElements;
    count = column >= width ? 0 : static_cast<int>(min(static_cast<size_t>(kRowElements), width - column));
  }
};

// Loads a thread's columns of one row. Columns beyond `count` become 0, and their memory is not touched.
// Packed: `count` is 0 or 8 and `from` is aligned to 16 bytes.
template <bool kPacked, class T>
__device__ void load_columns(const T* from, int count, float (&to)[kRowElements]) {
  if constexpr (kPacked) {
    constexpr int kPack = 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < kRowElements; k += kPack) {
      Pack<T, kPack> pack = {};
      if (count > 0) {
        pack = *reinterpret_cast<const Pack<T, kPack>*>(from + k);
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        to[k + i] = widen(pack.values[i]);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRowElements; ++k) {
      to[k] = k < count ? widen(from[k]) : 0.0f;
    }
  }
}

// Stores a thread's columns of one row, and rounds `values` to what was stored.
template <bool kPacked, class T>
__device__ void store_columns(float (&values)[kRowElements], int count, T* to) {
  if constexpr (kPacked) {
    constexpr int kPack = 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < kRowElements; k += kPack) {
      Pack<T, kPack> pack;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        narrow(values[k + i], &pack.values[i]);
        values[k + i] = widen(pack.values[i]);
      }
      if (count > 0) {
        *reinterpret_cast<Pack<T, kPack>*>(to + k) = pack;
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRowElements; ++k) {
      T narrowed;
      narrow(values[k], &narrowed);
      values[k] = widen(narrowed);
      if (k < count) {
        to[k] = narrowed;
      }
    }
  }
}

// Loads a thread's columns of the modulation row of its batch, plus `addend`.
__device__ inline void load_modulation(const void* rows, Dtype dtype, size_t stride, const RowPosition& at,
                                       float addend, float (&to)[kRowElements]) {
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    to[k] = k < at.count ? load_as(dtype, rows, at.batch * stride + at.column + k) + addend : 0.0f;
  }
}

// Replaces every thread's values by their sums over the block, in fixed order. Every thread must call. Calls
// must alternate between two buffers: the barrier of one then keeps the next from overwriting what is still
// read.
template <int N>
__device__ void block_sums(float (&values)[N], float (*buffer)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = warp_sum(values[i]);
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      buffer[threadIdx.x / 32][i] = values[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = 0;
  }
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] += buffer[warp][i];
    }
  }
}

// The results of sums over the rows of a batch, each (batch, width) and dense.
template <int N>
struct ColumnSums {
  void* out[N];
};

// out[k][b][j] = sum over p, in order, of partials[k][b][p][j]. Grid: (blocks of batch * width, N).
template <int N>
__global__ void column_sums_kernel(const float* partials, size_t num_partials, size_t width, size_t batch,
                                   ColumnSums<N> sums, Dtype dtype) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= batch * width) {
    return;
  }
  const float* from =
      partials + blockIdx.y * batch * num_partials * width + i / width * num_partials * width + i % width;
  float sum = 0;
  for (size_t p = 0; p < num_partials; ++p) {
    sum += from[p * width];
  }
  // Chosen by conditions: an index would move the arguments to local memory.
  void* out = sums.out[0];
#pragma unroll
  for (int k = 1; k < N; ++k) {
    out = blockIdx.y == k ? sums.out[k] : out;
  }
  store_as(dtype, sum, out, i);
}

template <int N>
void sum_columns(const float* partials, size_t num_partials, size_t width, size_t batch, ColumnSums<N> sums,
                 Dtype dtype, cudaStream_t stream) {
  launch(column_sums_kernel<N>, dim3(blocks_for(batch * width, 128), N), dim3(128), stream, partials,
         num_partials, width, batch, sums, dtype);
}

// Calls body(x, low, packed) with a value of the residual stream's type, one of the type that products take,
// and a std::bool_constant. The two types are the same, or x is f32.
template <class Body>
void with_row_types(Dtype x_dtype, Dtype low_dtype, bool packed, const Body& body) {
  const auto with_x = [&](auto x, auto low) {
    packed ? body(x, low, std::true_type()) : body(x, low, std::false_type());
  };
  with_element(low_dtype,
               [&](auto low) { x_dtype == Dtype::kF32 ? with_x(float(), low) : with_x(low, low); });
}

// True if a pointer and a width allow 16-byte accesses.
inline bool is_packable(const void* p, size_t width) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && width % kRowElements == 0;
}

}  // namespace kiln::ops::cuda
