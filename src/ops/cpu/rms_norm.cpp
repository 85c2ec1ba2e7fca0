// RMS norm of rows, and SiLU.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rms_norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "ops/cpu/kernels.h"
#include "ops/cpu/sigmoid-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE float sum_of_squares_of(const T* x, size_t width) {
  Vec sum0 = set(0), sum1 = set(0);
  size_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  for (; i < width; i += kLanes) {
    const Vec a = load(x + i, std::min(kLanes, width - i));
    sum0 = hn::MulAdd(a, a, sum0);
  }
  return sum_lanes(hn::Add(sum0, sum1));
}

void rms_norm_rows(const RmsNormRows& norm, const void* x, void* out, size_t rows) {
  with_element(norm.dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    for (size_t row = 0; row < rows; ++row, from += norm.width, to += norm.width) {
      const float mean = sum_of_squares_of(from, norm.width) / static_cast<float>(norm.width);
      const Vec factor = set(1 / std::sqrt(mean + norm.eps));
      for_each_vector(norm.width, [&](size_t i, size_t count) HWY_ATTR {
        const Vec normed = hn::Mul(load(from + i, count), factor);
        const Vec bias = norm.bias ? load(norm.bias + i, count) : set(0);
        store(hn::MulAdd(normed, load(norm.weight + i, count), bias), to + i, count);
      });
    }
  });
}

void silu_range(Dtype dtype, const void* in, void* out, size_t n) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    for_each_vector(
        n, [=](size_t i, size_t count) HWY_ATTR { store(silu(load(from + i, count)), to + i, count); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(rms_norm_rows);
HWY_EXPORT(silu_range);

void rms_norm(const RmsNormRows& norm, const void* x, void* out, size_t rows) {
  HWY_DYNAMIC_DISPATCH(rms_norm_rows)(norm, x, out, rows);
}

void silu(Dtype dtype, const void* in, void* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(silu_range)(dtype, in, out, n);
}

}  // namespace kiln::ops::cpu
#endif
