// Sums over the rows of a matrix: a bias gradient. Rows are read in memory order, eight at a time. The sums
// stay in the first-level cache and are loaded and stored once per eight rows.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/column_sum.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

template <size_t kRows, class T>
HWY_INLINE void add_rows(const T* rows, size_t width, float* sums) {
  for_each_vector(width, [&](size_t j, size_t count) HWY_ATTR {
    Vec sum = load(sums + j, count);
    for (size_t i = 0; i < kRows; ++i) {
      sum = hn::Add(sum, load(rows + i * width + j, count));
    }
    store(sum, sums + j, count);
  });
}

void column_sum_rows(Dtype dtype, const void* values, size_t rows, size_t width, float* sums) {
  for (size_t j = 0; j < width; ++j) {
    sums[j] = 0;
  }
  with_element(dtype, [&](auto element) HWY_ATTR {
    const auto* row = static_cast<const decltype(element)*>(values);
    size_t i = 0;
    for (; i + 8 <= rows; i += 8) {
      add_rows<8>(row + i * width, width, sums);
    }
    for (; i < rows; ++i) {
      add_rows<1>(row + i * width, width, sums);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(column_sum_rows);

void column_sum(Dtype dtype, const void* values, size_t rows, size_t width, float* sums) {
  HWY_DYNAMIC_DISPATCH(column_sum_rows)(dtype, values, rows, width, sums);
}

}  // namespace kiln::ops::cpu
#endif
