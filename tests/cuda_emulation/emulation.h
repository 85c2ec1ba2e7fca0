// Runs CUDA kernels on the CPU, from their own source: a thread of a block is a fiber, which gives way at
// barriers and shuffles. Slow and exact: indices, barriers and the order of sums are those of a GPU. Threads
// may run in either order; a kernel whose result depends on it has a race. Included ahead of a kernel's file,
// which is then compiled as plain C++.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "cuda_emulation/order.h"

#undef __shared__
#define __shared__ static  // blocks run one after another
#undef __launch_bounds__
#define __launch_bounds__(...)
#define cudaGetLastError kiln::emulation::last_error

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace kiln::emulation {

// Runs `thread` once for every thread of every block. Throws std::logic_error: some threads of a block wait
// at a barrier that others never reach.
void run(dim3 grid, dim3 block, const std::function<void()>& thread);

void block_barrier();
// Gives the value of the lane whose number differs in `lane_mask`. Every lane of the warp must call.
float exchange(float value, int lane_mask);

inline cudaError_t last_error() { return cudaSuccess; }

}  // namespace kiln::emulation

inline void __syncthreads() { kiln::emulation::block_barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  return kiln::emulation::exchange(value, lane_mask);
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
using std::max;
using std::min;
