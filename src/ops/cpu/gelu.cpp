// gelu_tanh(x) = x/2 (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). The second form
// needs one exponential and one division, and does not cancel for negative x.
//
// gelu(x) = x Phi(x), where Phi(-|x|) = erfc(z) / 2, z = |x| / sqrt(2), and erfc(z) = t 2^(p(t) - z^2
// log2(e)), t = 1 / (1 + z/2). p is fitted to z <= 5 with an error of 3e-8; beyond, Phi is below 1e-12.
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

constexpr float kFit[] = {-1.82405872f, 1.41335335f, 0.760709976f, -0.804221886f, 2.25305883f,
                          -3.97188813f, 3.2927616f,  -1.3393653f,  0.219650277f};

// Phi(x), the share of a standard normal distribution below x.
HWY_INLINE Vec normal_below(Vec x) {
  const Vec z = hn::Mul(hn::Abs(x), set(0.707106781f));
  const Vec t = hn::Div(set(1.0f), hn::MulAdd(z, set(0.5f), set(1.0f)));
  Vec p = set(kFit[8]);
  HWY_UNROLL(8)
  for (int i = 7; i >= 0; --i) p = hn::MulAdd(p, t, set(kFit[i]));
  const Vec power = exp2_below_127(hn::NegMulAdd(hn::Mul(z, z), set(kLog2E), p));
  const Vec tail = hn::Mul(hn::Mul(t, set(0.5f)), power);
  return hn::IfThenElse(hn::Lt(x, set(0.0f)), tail, hn::Sub(set(1.0f), tail));
}

// x times the density of that distribution.
HWY_INLINE Vec x_times_density(Vec x) {
  x = hn::Max(set(-14.0f), hn::Min(set(14.0f), x));  // beyond, the density is 0; this order keeps NaN
  return hn::Mul(hn::Mul(x, set(0.398942280f)), exp2_below_127(hn::Mul(hn::Mul(x, x), set(-0.5f * kLog2E))));
}

void geglu_rows(Dtype dtype, const void* h, void* out, size_t rows, size_t width) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (size_t row = 0; row < rows; ++row) {
      const T *value = static_cast<const T*>(h) + row * 2 * width, *gate = value + width;
      T* to = static_cast<T*>(out) + row * width;
      for_each_vector(width, [=](size_t i, size_t count) HWY_ATTR {
        const Vec x = load(gate + i, count);
        store(hn::Mul(load(value + i, count), hn::Mul(x, normal_below(x))), to + i, count);
      });
    }
  });
}

void geglu_grad_rows(Dtype dtype, const void* grad, const void* h, void* grad_h, size_t rows, size_t width) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (size_t row = 0; row < rows; ++row) {
      const T *value = static_cast<const T*>(h) + row * 2 * width, *gate = value + width,
              *from = static_cast<const T*>(grad) + row * width;
      T *to_value = static_cast<T*>(grad_h) + row * 2 * width, *to_gate = to_value + width;
      for_each_vector(width, [=](size_t i, size_t count) HWY_ATTR {
        const Vec x = load(gate + i, count), g = load(from + i, count), below = normal_below(x);
        store(hn::Mul(g, hn::Mul(x, below)), to_value + i, count);
        store(hn::Mul(hn::Mul(g, load(value + i, count)), hn::Add(x_times_density(x), below)), to_gate + i,
              count);
      });
    }
  });
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
HWY_EXPORT(geglu_rows);
HWY_EXPORT(geglu_grad_rows);

void gelu_tanh(Dtype dtype, const void* in, void* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(gelu_range)(dtype, in, out, n);
}

void gelu_tanh_grad(Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n) {
  HWY_DYNAMIC_DISPATCH(gelu_grad_range)(dtype, grad, in, grad_in, n);
}

void geglu(Dtype dtype, const void* h, void* out, size_t rows, size_t width) {
  HWY_DYNAMIC_DISPATCH(geglu_rows)(dtype, h, out, rows, width);
}

void geglu_grad(Dtype dtype, const void* grad, const void* h, void* grad_h, size_t rows, size_t width) {
  HWY_DYNAMIC_DISPATCH(geglu_grad_rows)(dtype, grad, h, grad_h, rows, width);
}

}  // namespace kiln::ops::cpu
#endif
