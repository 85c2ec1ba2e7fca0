// Sums over the rows of a batch: a block of (32 columns, 8 row lanes) sums the rows of one partial, and a
// second kernel sums the partials, both in fixed order.
#pragma once
#include "ops/cuda/elements.cuh"

namespace kiln::ops::cuda {

inline constexpr int kColumns = 32;
inline constexpr int kRowLanes = 8;

// Which rows and column a thread of such a block has. Grid: (ceil(width / 32), partials per batch, batch).
struct ColumnPosition {
  size_t column, first_row, end_row, partial;  // rows count over all batches; partial = batch * P + index

  __device__ ColumnPosition(size_t rows_per_batch, size_t rows_per_partial) {
    column = static_cast<size_t>(blockIdx.x) * kColumns + threadIdx.x;
    const size_t batch_row = blockIdx.z * rows_per_batch;
    first_row = batch_row + blockIdx.y * rows_per_partial;
    end_row = min(first_row + rows_per_partial, batch_row + rows_per_batch);
    partial = static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  }
};

// The sum of `v` over the row lanes of this thread's column, valid where threadIdx.y is 0. Every thread must
// call.
__device__ inline float sum_over_row_lanes(float v) {
  __shared__ float sums[kRowLanes][kColumns];
  __syncthreads();
  sums[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  float total = 0;
  for (int y = 0; y < kRowLanes; ++y) {
    total += sums[y][threadIdx.x];
  }
  return total;
}

// out[b][j] = sum over p of partials[b][p][j].
static __global__ void sum_partials_kernel(const float* partials, size_t num_partials, size_t width,
                                           size_t batch, void* out, Dtype out_dtype) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= batch * width) {
    return;
  }
  const float* from = partials + i / width * num_partials * width + i % width;
  float sum = 0;
  for (size_t p = 0; p < num_partials; ++p) {
    sum += from[p * width];
  }
  store_as(out_dtype, sum, out, i);
}

static void sum_partials(const float* partials, size_t num_partials, size_t width, size_t batch, void* out,
                         Dtype out_dtype, cudaStream_t stream) {
  sum_partials_kernel<<<blocks_for(batch * width, 128), 128, 0, stream>>>(partials, num_partials, width,
                                                                          batch, out, out_dtype);
}

}  // namespace kiln::ops::cuda
