#include "data/sample_order.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "data/batches.h"

namespace kiln {
namespace {

TEST(ShuffledIndex, IsAPermutation) {
  for (const int64_t size : {1, 2, 3, 5, 16, 17, 100, 1023, 1024, 1025, 5000}) {
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<bool> seen(size);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t j = shuffled_index(9, epoch, size, i);
        ASSERT_TRUE(j >= 0 && j < size && !seen[j]) << size << " " << i;
        seen[j] = true;
      }
    }
  }
}

// All orders of a few samples are equally likely.
TEST(ShuffledIndex, OrdersAreUniform) {
  constexpr int kNumEpochs = 60'000;
  for (const int64_t size : {3, 4, 5}) {
    std::map<int64_t, int> counts;
    for (int64_t epoch = 0; epoch < kNumEpochs; ++epoch) {
      int64_t order = 0;
      for (int64_t i = 0; i < size; ++i) order = order * 8 + shuffled_index(7, epoch, size, i);
      ++counts[order];
    }
    const double num_orders = std::tgamma(size + 1), expected = kNumEpochs / num_orders;
    EXPECT_EQ(static_cast<double>(counts.size()), num_orders);
    double chi_square = 0;
    for (const auto& [order, count] : counts)
      chi_square += (count - expected) * (count - expected) / expected;
    const double freedom = num_orders - 1;
    EXPECT_LT(chi_square, freedom + 4 * std::sqrt(2 * freedom)) << size;
  }
}

// Where a sample goes is uniform and independent of where its neighbour goes.
TEST(ShuffledIndex, PositionsOfALargeSetAreUniform) {
  constexpr int64_t kSize = 100'000;
  constexpr int kNumBins = 10;
  std::vector<double> places(kNumBins), steps(kNumBins);
  constexpr int kNumEpochs = 20'000;
  for (int64_t epoch = 0; epoch < kNumEpochs; ++epoch) {
    const int64_t a = shuffled_index(1, epoch, kSize, 41), b = shuffled_index(1, epoch, kSize, 42);
    ++places[a * kNumBins / kSize];
    ++steps[(b - a + kSize) % kSize * kNumBins / kSize];
  }
  for (const auto& bins : {places, steps}) {
    double chi_square = 0;
    for (const double count : bins)
      chi_square += std::pow(count - kNumEpochs / 10.0, 2) / (kNumEpochs / 10.0);
    EXPECT_LT(chi_square, 27.9);  // 9 degrees of freedom, probability 0.001
  }
}

TEST(ShuffledIndex, SeedsAndEpochsGiveOtherOrders) {
  int same_seed = 0, same_epoch = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same_seed += shuffled_index(1, 0, 1000, i) == shuffled_index(2, 0, 1000, i);
    same_epoch += shuffled_index(1, 0, 1000, i) == shuffled_index(1, 1, 1000, i);
  }
  EXPECT_LT(same_seed, 10);  // 1 expected
  EXPECT_LT(same_epoch, 10);
}

TEST(ShuffledIndex, WorksForSetsBeyond32Bits) {
  const int64_t size = (int64_t{1} << 40) + 12345;
  for (int64_t i = 0; i < 100; ++i) {
    const int64_t j = shuffled_index(1, 0, size, i);
    EXPECT_GE(j, 0);
    EXPECT_LT(j, size);
  }
}

TEST(SampleAt, JoinsEpochs) {
  for (int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(sample_at(4, 7, position), shuffled_index(4, position / 7, 7, position % 7));
  }
}

}  // namespace
}  // namespace kiln
