// AdamW, EMAs and the cast to compute weights in one pass. Every rounding is spelled out (no contraction), so
// packed and single elements, and hence any split of the memory, give the same bits.
#include <algorithm>

#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPack = 4;
// In the pass itself; each further one gets its own pass. Loops over them are unrolled: an index that is
// known when it is compiled keeps the arguments out of local memory.
constexpr int kMaxEmas = 4;

struct Emas {
  float* weights[kMaxEmas];
  float steps[kMaxEmas];
  int count;
};

struct Element {
  float p, m, v;
};

__device__ Element update(Element e, float grad, const AdamwFactors& f) {
  const float g = __fmul_rn(grad, f.grad_scale);
  e.m = __fmaf_rn(__fsub_rn(g, e.m), f.step_beta1, e.m);
  e.v = __fmaf_rn(__fmul_rn(g, g), f.step_beta2, __fmul_rn(e.v, f.beta2));
  const float denominator = __fmaf_rn(__fsqrt_rn(e.v), f.inv_sqrt_correction2, f.eps);
  e.p = __fmaf_rn(-__fdiv_rn(e.m, denominator), f.step_size, __fmul_rn(e.p, f.keep));
  return e;
}

// Returns d e + (1 - d) p as e + (1 - d) (p - e): rounding d = 0.9999 to f32 would otherwise shrink e by 2e-8
// a step.
__device__ float averaged(float ema, float p, float step) { return __fmaf_rn(__fsub_rn(p, ema), step, ema); }

// Updates the `count` elements from i on, one by one.
template <class TGrad, class TCompute>
__device__ void update_singles(const AdamwElements& e, const AdamwFactors& f, const Emas& emas,
                               TCompute* compute, size_t i, size_t count) {
  for (size_t end = i + count; i < end; ++i) {
    const Element r =
        update({e.master[i], e.exp_avg[i], e.exp_avg_sq[i]}, widen(static_cast<const TGrad*>(e.grad)[i]), f);
    e.master[i] = r.p;
    e.exp_avg[i] = r.m;
    e.exp_avg_sq[i] = r.v;
#pragma unroll
    for (int k = 0; k < kMaxEmas; ++k) {
      if (k < emas.count) {
        emas.weights[k][i] = averaged(emas.weights[k][i], r.p, emas.steps[k]);
      }
    }
    if (compute != nullptr) {
      narrow(r.p, compute + i);
    }
  }
}

template <class T>
__device__ Pack<T, kPack>& pack_at(T* p, size_t i) {
  return *reinterpret_cast<Pack<T, kPack>*>(p + i);
}

template <class T>
__device__ const Pack<T, kPack>& pack_at(const T* p, size_t i) {
  return *reinterpret_cast<const Pack<T, kPack>*>(p + i);
}

template <class TGrad, class TCompute, bool kPacked>
__global__ void adamw_kernel(AdamwElements e, AdamwFactors f, Emas emas, TCompute* compute, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (e.device_scale != nullptr) {
    f.grad_scale = *e.device_scale;
  }
  if (i >= n || f.grad_scale != f.grad_scale) {
    return;
  }
  if (!kPacked || i + kPack > n) {
    update_singles<TGrad>(e, f, emas, compute, i, min(static_cast<size_t>(kPack), n - i));
    return;
  }
  const auto grad = pack_at(static_cast<const TGrad*>(e.grad), i);
  auto p = pack_at(e.master, i), m = pack_at(e.exp_avg, i), v = pack_at(e.exp_avg_sq, i);
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const Element r = update({p.values[k], m.values[k], v.values[k]}, widen(grad.values[k]), f);
    p.values[k] = r.p;
    m.values[k] = r.m;
    v.values[k] = r.v;
  }
  pack_at(e.master, i) = p;
  pack_at(e.exp_avg, i) = m;
  pack_at(e.exp_avg_sq, i) = v;
#pragma unroll
  for (int j = 0; j < kMaxEmas; ++j) {
    if (j >= emas.count) {
      break;
    }
    auto ema = pack_at(emas.weights[j], i);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      ema.values[k] = averaged(ema.values[k], p.values[k], emas.steps[j]);
    }
    pack_at(emas.weights[j], i) = ema;
  }
  if (compute != nullptr) {
    Pack<TCompute, kPack> low;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      narrow(p.values[k], &low.values[k]);
    }
    pack_at(compute, i) = low;
  }
}

__global__ void ema_kernel(float* ema, const float* master, float step, const float* device_scale, size_t n) {
  const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool skips = device_scale != nullptr && *device_scale != *device_scale;
  if (i < n && !skips) {
    ema[i] = averaged(ema[i], master[i], step);
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_adamw(const kiln::ops::AdamwElements* elements, const kiln::ops::AdamwFactors* factors,
                    size_t n, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const kiln::ops::AdamwElements& e = *elements;
  Emas emas = {};
  emas.count = static_cast<int>(std::min<size_t>(e.num_emas, kMaxEmas));
  bool packed = is_aligned_for<kPack>(e.master) && is_aligned_for<kPack>(e.exp_avg) &&
                is_aligned_for<kPack>(e.exp_avg_sq);
  for (int k = 0; k < emas.count; ++k) {
    emas.weights[k] = e.emas[k];
    emas.steps[k] = e.ema_steps[k];
    packed = packed && is_aligned_for<kPack>(e.emas[k]);
  }
  const unsigned blocks = blocks_for(n, kThreads * kPack);
  with_element(e.grad_dtype, [&](auto grad) {
    using TGrad = decltype(grad);
    with_element(e.compute_dtype, [&](auto low) {
      auto* compute = static_cast<decltype(low)*>(e.compute_weights);
      if (packed && is_aligned_for<kPack>(static_cast<const TGrad*>(e.grad)) &&
          is_aligned_for<kPack>(compute)) {
        launch(adamw_kernel<TGrad, decltype(low), true>, dim3(blocks), dim3(kThreads), s, e, *factors, emas,
               compute, n);
      } else {
        launch(adamw_kernel<TGrad, decltype(low), false>, dim3(blocks), dim3(kThreads), s, e, *factors, emas,
               compute, n);
      }
    });
  });
  for (size_t k = kMaxEmas; k < e.num_emas; ++k) {
    launch(ema_kernel, dim3(blocks_for(n, kThreads)), dim3(kThreads), s, e.emas[k], e.master, e.ema_steps[k],
           e.device_scale, n);
  }
  return last_error();
}
