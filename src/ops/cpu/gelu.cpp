// gelu_tanh(x) = x/2 (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). The second form
// needs one exponential and one division, and does not cancel for negative x.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/gelu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/sigmoid-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr float kCubic = 0.044715f;
constexpr float kTwoU = 1.5957691216057308f;  // 2 sqrt(2/pi)

// exp(-2u)
HWY_INLINE Vec exp_minus_2u(Vec x, Vec x_squared) {
  const Vec factor = hn::MulAdd(x_squared, set(-kTwoU * kLog2E * kCubic), set(-kTwoU * kLog2E));
  return exp2(hn::Mul(x, factor));
}

HWY_INLINE Vec gelu(Vec x) { return hn::Div(x, hn::Add(set(1.0f), exp_minus_2u(x, hn::Mul(x, x)))); }

// With s = 1/(1 + exp(-2u)): d(x s)/dx = s + x s (1 - s) d(2u)/dx.
HWY_INLINE Vec gelu_slope(Vec x) {
  x = hn::Max(set(-10.0f), hn::Min(set(10.0f), x));  // beyond, the slope is 0 or 1; this order keeps NaN
  const Vec x_squared = hn::Mul(x, x);
  const Vec e = exp_minus_2u(x, x_squared);
  const Vec s = hn::Div(set(1.0f), hn::Add(set(1.0f), e));
  const Vec slope_2u = hn::MulAdd(x_squared, set(3 * kCubic * kTwoU), set(kTwoU));
  return hn::MulAdd(hn::Mul(x, slope_2u), hn::Mul(s, hn::Mul(e, s)), s);
}

void gelu_range(Dtype dtype, const void* in, void* out, size_t n) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    for_each_vector(
        n, [=](size_t i, size_t count) HWY_ATTR { store(gelu(load(from + i, count)), to + i, count); });
  });
}

void gelu_grad_range(Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(in);
    const T* g = static_cast<const T*>(grad);
    T* to = static_cast<T*>(grad_in);
    for_each_vector(n, [=](size_t i, size_t count) HWY_ATTR {
      store(hn::Mul(load(g + i, count), gelu_slope(load(from + i, count))), to + i, count);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(gelu_range);
HWY_EXPORT(gelu_grad_range);

void gelu_tanh(Dtype dtype, const void* in, void* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(gelu_range)(dtype, in, out, n);
}

void gelu_tanh_grad(Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n) {
  HWY_DYNAMIC_DISPATCH(gelu_grad_range)(dtype, grad, in, grad_in, n);
}

}  // namespace kiln::ops::cpu
#endif
