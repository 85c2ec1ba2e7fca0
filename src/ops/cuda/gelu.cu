// gelu_tanh(x) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): one exponential, no cancellation.
#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kCubic = 0.044715f;
constexpr float kTwoU = 1.5957691216057308f;  // 2 sqrt(2/pi)

// Uses the fast exponential and division. Their error is some units in the last place of f32, far below the
// precision of the memory.
__device__ float sigmoid_2u(float x) {
  return __fdividef(1.0f, 1 + __expf(-kTwoU * x * (1 + kCubic * x * x)));
}

__device__ float gelu(float x) { return x * sigmoid_2u(x); }

// With s = 1/(1 + exp(-2u)): d(x s)/dx = s + x s (1 - s) d(2u)/dx.
__device__ float gelu_slope(float x) {
  if (fabsf(x) > 10) {
    return x > 0 ? 1.0f : 0.0f;
  }
  const float s = sigmoid_2u(x);
  return s + x * s * (1 - s) * kTwoU * (1 + 3 * kCubic * x * x);
}

template <class T, int N>
__global__ void gelu_kernel(const T* in, T* out, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i + N <= n) {
    const Pack<T, N> x = *reinterpret_cast<const Pack<T, N>*>(in + i);
    Pack<T, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      narrow(gelu(widen(x.values[k])), &y.values[k]);
    }
    *reinterpret_cast<Pack<T, N>*>(out + i) = y;
  } else {
    for (size_t j = i; j < n; ++j) {
      narrow(gelu(widen(in[j])), out + j);
    }
  }
}

template <class T, int N>
__global__ void gelu_grad_kernel(const T* grad, const T* in, T* grad_in, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i + N <= n) {
    const Pack<T, N> x = *reinterpret_cast<const Pack<T, N>*>(in + i);
    const Pack<T, N> g = *reinterpret_cast<const Pack<T, N>*>(grad + i);
    Pack<T, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      narrow(widen(g.values[k]) * gelu_slope(widen(x.values[k])), &y.values[k]);
    }
    *reinterpret_cast<Pack<T, N>*>(grad_in + i) = y;
  } else {
    for (size_t j = i; j < n; ++j) {
      narrow(widen(grad[j]) * gelu_slope(widen(in[j])), grad_in + j);
    }
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_gelu_tanh(kiln::Dtype dtype, const void* in, void* out, size_t n, void* stream) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kPack = 16 / sizeof(T);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    const auto s = static_cast<cudaStream_t>(stream);
    if (is_aligned_for<kPack>(from) && is_aligned_for<kPack>(to)) {
      launch(gelu_kernel<T, kPack>, dim3(blocks_for(n, kThreads * kPack)), dim3(kThreads), s, from, to, n);
    } else {
      launch(gelu_kernel<T, 1>, dim3(blocks_for(n, kThreads)), dim3(kThreads), s, from, to, n);
    }
  });
  return last_error();
}

int kiln_cuda_gelu_tanh_grad(kiln::Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n,
                             void* stream) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kPack = 16 / sizeof(T);
    const T* g = static_cast<const T*>(grad);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(grad_in);
    const auto s = static_cast<cudaStream_t>(stream);
    if (is_aligned_for<kPack>(g) && is_aligned_for<kPack>(from) && is_aligned_for<kPack>(to)) {
      launch(gelu_grad_kernel<T, kPack>, dim3(blocks_for(n, kThreads * kPack)), dim3(kThreads), s, g, from,
             to, n);
    } else {
      launch(gelu_grad_kernel<T, 1>, dim3(blocks_for(n, kThreads)), dim3(kThreads), s, g, from, to, n);
    }
  });
  return last_error();
}
