// AdamW, EMAs and the cast to compute weights in one pass: every element of memory is touched once. Whole and
// partial vectors take the same elementwise operations, so any split of the range gives the same bits.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/streams-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Keeps the factors in registers. As floats in memory, the stores might alias them.
struct VectorFactors {
  explicit HWY_INLINE VectorFactors(const AdamwFactors& f)
      : grad_scale(set(f.grad_scale)),
        keep(set(f.keep)),
        step_beta1(set(f.step_beta1)),
        beta2(set(f.beta2)),
        step_beta2(set(f.step_beta2)),
        step_size(set(f.step_size)),
        inv_sqrt_correction2(set(f.inv_sqrt_correction2)),
        eps(set(f.eps)) {}
  Vec grad_scale, keep, step_beta1, beta2, step_beta2, step_size, inv_sqrt_correction2, eps;
};

template <class TGrad, class TCompute>
void adamw_elements(const AdamwElements& e, const AdamwFactors& factors, TCompute* compute, size_t begin,
                    size_t end) {
  const TGrad* grads = static_cast<const TGrad*>(e.grad);
  const VectorFactors f(factors);
  const bool streams = end - begin >= size_t{kStreamedElements} && can_stream(compute + begin);
  for_each_vector(end - begin, [=, &e](size_t offset, size_t count) HWY_ATTR {
    const size_t i = begin + offset;
    fetch_ahead(grads + i);
    fetch_ahead(e.exp_avg + i);
    fetch_ahead(e.exp_avg_sq + i);
    fetch_ahead(e.master + i);
    const Vec g = hn::Mul(load(grads + i, count), f.grad_scale);
    const Vec m_old = load(e.exp_avg + i, count);
    const Vec m = hn::MulAdd(hn::Sub(g, m_old), f.step_beta1, m_old);
    const Vec v = hn::MulAdd(hn::Mul(g, g), f.step_beta2, hn::Mul(load(e.exp_avg_sq + i, count), f.beta2));
    const Vec denominator = hn::MulAdd(hn::Sqrt(v), f.inv_sqrt_correction2, f.eps);
    const Vec decayed = hn::Mul(load(e.master + i, count), f.keep);
    const Vec p = hn::NegMulAdd(hn::Div(m, denominator), f.step_size, decayed);
    store(m, e.exp_avg + i, count);
    store(v, e.exp_avg_sq + i, count);
    store(p, e.master + i, count);
    for (size_t k = 0; k < e.num_emas; ++k) {
      // Computes d e + (1 - d) p as e + (1 - d) (p - e): rounding d = 0.9999 to f32 would otherwise shrink e
      // by 2e-8 a step.
      fetch_ahead(e.emas[k] + i);
      const Vec ema = load(e.emas[k] + i, count);
      store(hn::MulAdd(hn::Sub(p, ema), set(e.ema_steps[k]), ema), e.emas[k] + i, count);
    }
    store_weights(p, compute + i, count, streams);
  });
  if (streams) hwy::FlushStream();
}

void adamw_range(const AdamwElements& e, const AdamwFactors& f, size_t begin, size_t end) {
  with_element(e.grad_dtype, [&](auto element) HWY_ATTR {
    using TGrad = decltype(element);
    with_compute(e.compute_weights, e.compute_dtype,
                 [&](auto* compute) HWY_ATTR { adamw_elements<TGrad>(e, f, compute, begin, end); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(adamw_range);

void adamw(const AdamwElements& elements, const AdamwFactors& factors, size_t begin, size_t end) {
  HWY_DYNAMIC_DISPATCH(adamw_range)(elements, factors, begin, end);
}

}  // namespace kiln::ops::cpu
#endif
