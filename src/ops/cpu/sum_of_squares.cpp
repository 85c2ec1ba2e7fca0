// Sum of squares in f64. Squares of f32 are exact in f64, so only the order of the additions matters: 16
// interleaved sums, then a fixed tree, on every instruction set.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/sum_of_squares.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kSums = 16;

template <class T>
double squares(const T* values, size_t n) {
  using F64 = hn::CappedTag<double, 8>;
  const F64 d64;
  const hn::Rebind<float, F64> half;
  constexpr size_t kStep = hn::MaxLanes(F64());
  constexpr size_t kVectors = kSums / kStep;
  static_assert(kLanes == 2 * kStep || kLanes == 1);
  HWY_ALIGN float block[kSums];
  HWY_ALIGN double sums[kSums] = {};
  hn::Vec<F64> accumulators[kVectors];
  for (auto& a : accumulators) {
    a = hn::Zero(d64);
  }
  const auto add = [&](size_t k, auto narrow) HWY_ATTR {
    const auto wide = hn::PromoteTo(d64, narrow);
    accumulators[k] = hn::MulAdd(wide, wide, accumulators[k]);
  };
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (!std::is_same_v<T, float>) {  // whole blocks are widened without `block` in between
    for (; i + kSums <= n; i += kSums) {
      for (size_t k = 0; k < kVectors; k += 2) {
        const Vec loaded = load(values + i + k * kStep);
        add(k, hn::LowerHalf(half, loaded));
        add(k + 1, hn::UpperHalf(half, loaded));
      }
    }
  }
#endif
  for (; i < n; i += kSums) {
    const float* from = block;
    const size_t count = n - i < kSums ? n - i : kSums;
    if constexpr (std::is_same_v<T, float>) {
      if (count == kSums) {
        from = values + i;
      }
    }
    if (from == block) {
      for (size_t j = 0; j < kSums; j += kLanes) {
        store(j < count ? load(values + i + j, std::min(count - j, kLanes)) : set(0), block + j);
      }
    }
    for (size_t k = 0; k < kVectors; ++k) {
      add(k, hn::LoadU(half, from + k * kStep));
    }
  }
  for (size_t k = 0; k < kVectors; ++k) {
    hn::StoreU(accumulators[k], d64, sums + k * kStep);
  }
  for (size_t width = kSums / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) {
      sums[j] += sums[j + width];
    }
  }
  return sums[0];
}

double sum_of_squares_range(Dtype dtype, const void* values, size_t n) {
  double sum = 0;
  with_element(
      dtype, [&](auto element) HWY_ATTR { sum = squares(static_cast<const decltype(element)*>(values), n); });
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(sum_of_squares_range);

double sum_of_squares(Dtype dtype, const void* values, size_t n) {
  return HWY_DYNAMIC_DISPATCH(sum_of_squares_range)(dtype, values, n);
}

}  // namespace kiln::ops::cpu
#endif
