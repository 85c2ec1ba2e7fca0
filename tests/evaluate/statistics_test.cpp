// Statistics of features that stream.
#include "evaluate/metrics.h"

#include <gtest/gtest.h>

#include "core/allocations.h"
#include "core/aten.h"

namespace kiln {
namespace {

// The sum and a batch's product are two matrices, and adding may take a third; a batch is copied. Even in f32
// all features are 20 times that.
TEST(FeatureStatistics, HoldNoFeatures) {
  install_tracking_cpu_allocator();
  constexpr int64_t kWidth = 256, kBatch = 50, kBatches = 800, kF64 = 8, kF32 = 4;
  constexpr int64_t kMatrix = kF64 * kWidth * kWidth;
  constexpr int64_t kBound = 3 * kMatrix + 4 * kF64 * kBatch * kWidth;
  static_assert(20 * kBound < kF32 * kBatch * kBatches * kWidth);
  const int64_t before = live_cpu_bytes().live;
  reset_peak_cpu_bytes();
  FeatureStatistics statistics;
  double sum = 0;
  for (int64_t i = 0; i < kBatches; ++i) {
    const at::Tensor batch =
        at::full({kBatch, kWidth}, static_cast<double>(i), at::TensorOptions(at::kFloat));
    sum += static_cast<double>(i);
    statistics.add(batch);
  }
  const int64_t peak = live_cpu_bytes().peak - before;
  EXPECT_GT(peak, kMatrix);
  EXPECT_LT(peak, kBound);
  const GaussianStatistics result = statistics.finish();
  EXPECT_EQ(result.count, kBatch * kBatches);
  EXPECT_NEAR(result.mu[0].item<double>(), sum / kBatches, 1e-9);
}

}  // namespace
}  // namespace kiln
