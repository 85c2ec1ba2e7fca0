// Sum of squares in f64. The grid is fixed, so that the order of additions depends on the length alone.
#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;

// The sum over the block, valid in thread 0.
__device__ double block_sum(double v) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = v;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    if (threadIdx.x < stride) {
      sums[threadIdx.x] += sums[threadIdx.x + stride];
    }
  }
  return sums[0];
}

template <class T>
__global__ void squares_kernel(const T* values, size_t n, double* partials) {
  double sum = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const double v = widen(values[i]);
    sum += v * v;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
  }
}

__global__ void total_kernel(const double* partials, double* total) {
  double sum = 0;
  for (int i = threadIdx.x; i < kSumOfSquaresPartials; i += kThreads) {
    sum += partials[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    *total = sum;
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_sum_of_squares(kiln::Dtype dtype, const void* values, size_t n, double* partials, double* sum,
                             void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_element(dtype, [&](auto element) {
    squares_kernel<<<kSumOfSquaresPartials, kThreads, 0, s>>>(static_cast<const decltype(element)*>(values),
                                                              n, partials);
  });
  total_kernel<<<1, kThreads, 0, s>>>(partials, sum);
  return last_error();
}
