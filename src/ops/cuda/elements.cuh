// Reads and writes elements of f32, bf16 and fp16 memory as floats, one at a time or packed.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace kiln::ops::cuda {

__device__ inline float widen(float v) { return v; }
__device__ inline float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float widen(__half v) { return __half2float(v); }

__device__ inline void narrow(float v, float* to) { *to = v; }
__device__ inline void narrow(float v, __nv_bfloat16* to) { *to = __float2bfloat16_rn(v); }
__device__ inline void narrow(float v, __half* to) { *to = __float2half_rn(v); }

// For values that are read so seldom that one more branch costs nothing: modulation rows, sums.
__device__ inline float load_as(Dtype dtype, const void* p, size_t i) {
  switch (dtype) {
    case Dtype::kBF16:
      return widen(static_cast<const __nv_bfloat16*>(p)[i]);
    case Dtype::kF16:
      return widen(static_cast<const __half*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}
__device__ inline void store_as(Dtype dtype, float v, void* p, size_t i) {
  switch (dtype) {
    case Dtype::kBF16:
      return narrow(v, static_cast<__nv_bfloat16*>(p) + i);
    case Dtype::kF16:
      return narrow(v, static_cast<__half*>(p) + i);
    default:
      return narrow(v, static_cast<float*>(p) + i);
  }
}

// N elements that are read and written in one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

template <int N, class T>
bool is_aligned_for(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (sizeof(T) * N) == 0;
}

// Calls body(element) on the host with a value of the type that `dtype` names.
template <class Body>
void with_element(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kBF16:
      return body(__nv_bfloat16());
    case Dtype::kF16:
      return body(__half());
    default:
      return body(float());
  }
}

__device__ inline float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(0xffffffffu, v, offset);
  }
  return v;
}

inline unsigned blocks_for(size_t n, size_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

// Enqueues kernel<<<grid, block>>>(args...). Where a test emulates the kernels on the CPU, runs it there.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, const Args&... args) {
#ifdef KILN_CUDA_EMULATION
  emulation::run(grid, block, [&] { kernel(static_cast<Parameters>(args)...); });
#else
  // clang-format off
  kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(args)...);
  // clang-format on
#endif
}

inline int last_error() { return static_cast<int>(cudaGetLastError()); }

}  // namespace kiln::ops::cuda
