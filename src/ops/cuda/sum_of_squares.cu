// Sum of squares in f64. The grid is fixed, so the order of additions depends on the length and the alignment
// alone.
#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;

// Returns the sum over the block; valid in thread 0.
__device__ double block_sum(double v) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = v;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(stride)) {
      sums[threadIdx.x] += sums[threadIdx.x + stride];
    }
  }
  return sums[0];
}

// Reads N elements in one access. The first threads add the elements that fill no pack.
template <class T, int N>
__global__ void squares_kernel(const T* values, size_t n, double* partials) {
  double sum = 0;
  const size_t first = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x,
               step = static_cast<size_t>(gridDim.x) * kThreads, num_packs = n / N;
  for (size_t i = first; i < num_packs; i += step) {
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(values + i * N);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double v = widen(pack.values[k]);
      sum += v * v;
    }
  }
  if (first < n % N) {
    const double v = widen(values[num_packs * N + first]);
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

__device__ bool is_finite(double v) { return v - v == 0; }

__global__ void step_scale_kernel(const double* sum_of_squares, const double* losses, size_t num_losses,
                                  double max_norm, double loss_scale, float* scale) {
  __shared__ bool wrong;
  if (threadIdx.x == 0) {
    wrong = !is_finite(*sum_of_squares);
  }
  __syncthreads();
  for (size_t i = threadIdx.x; i < num_losses; i += kThreads) {
    if (!is_finite(losses[i])) {
      wrong = true;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const double norm = sqrt(*sum_of_squares) / loss_scale;
    const double coefficient = max_norm > 0 ? min(1.0, max_norm / (norm + 1e-6)) : 1.0;
    *scale = wrong ? NAN : static_cast<float>(coefficient / loss_scale);
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_sum_of_squares(kiln::Dtype dtype, const void* values, size_t n, double* partials, double* sum,
                             void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kPack = 16 / sizeof(T);
    const T* from = static_cast<const T*>(values);
    launch(is_aligned_for<kPack>(from) ? squares_kernel<T, kPack> : squares_kernel<T, 1>,
           dim3(kSumOfSquaresPartials), dim3(kThreads), s, from, n, partials);
  });
  launch(total_kernel, dim3(1), dim3(kThreads), s, partials, sum);
  return last_error();
}

int kiln_cuda_step_scale(const double* sum_of_squares, const double* losses, size_t num_losses,
                         double max_norm, double loss_scale, float* scale, void* stream) {
  launch(step_scale_kernel, dim3(1), dim3(kThreads), static_cast<cudaStream_t>(stream), sum_of_squares,
         losses, num_losses, max_norm, loss_scale, scale);
  return last_error();
}
