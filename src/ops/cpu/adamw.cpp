// AdamW, EMAs and the cast to compute weights in one pass: every element of memory is touched once.
// Elementwise with the same operations for whole and partial vectors, so any split of the range gives the
// same bits.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

struct NoCompute {};
HWY_INLINE void store(Vec, NoCompute*, size_t) {}

template <class TGrad, class TCompute>
void adamw_elements(const AdamwElements& e, const AdamwFactors& f, TCompute* compute, size_t begin,
                    size_t end) {
  const TGrad* grads = static_cast<const TGrad*>(e.grad);
  for_each_vector(end - begin, [=, &e, &f](size_t offset, size_t count) HWY_ATTR {
    const size_t i = begin + offset;
    const Vec g = hn::Mul(load(grads + i, count), set(f.grad_scale));
    const Vec m_old = load(e.exp_avg + i, count);
    const Vec m = hn::MulAdd(hn::Sub(g, m_old), set(f.step_beta1), m_old);
    const Vec v =
        hn::MulAdd(hn::Mul(g, g), set(f.step_beta2), hn::Mul(load(e.exp_avg_sq + i, count), set(f.beta2)));
    const Vec denominator = hn::MulAdd(hn::Sqrt(v), set(f.inv_sqrt_correction2), set(f.eps));
    const Vec decayed = hn::Mul(load(e.master + i, count), set(f.keep));
    const Vec p = hn::NegMulAdd(hn::Div(m, denominator), set(f.step_size), decayed);
    store(m, e.exp_avg + i, count);
    store(v, e.exp_avg_sq + i, count);
    store(p, e.master + i, count);
    for (size_t k = 0; k < e.num_emas; ++k) {
      // d e + (1 - d) p as e + (1 - d) (p - e): rounding of d = 0.9999 to f32 would otherwise shrink e by
      // 2e-8 a step.
      const Vec ema = load(e.emas[k] + i, count);
      store(hn::MulAdd(hn::Sub(p, ema), set(e.ema_steps[k]), ema), e.emas[k] + i, count);
    }
    store(p, compute + i, count);
  });
}

void adamw_range(const AdamwElements& e, const AdamwFactors& f, size_t begin, size_t end) {
  with_element(e.grad_dtype, [&](auto element) HWY_ATTR {
    using TGrad = decltype(element);
    if (e.compute_weights == nullptr) {
      adamw_elements<TGrad>(e, f, static_cast<NoCompute*>(nullptr), begin, end);
    } else if (e.compute_dtype == Dtype::kBF16) {
      adamw_elements<TGrad>(e, f, static_cast<Bf16*>(e.compute_weights), begin, end);
    } else {
      adamw_elements<TGrad>(e, f, static_cast<Fp16*>(e.compute_weights), begin, end);
    }
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
