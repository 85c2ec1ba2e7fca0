#include "data/store/sample_order.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/error.h"

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

SampleLane lane(int64_t first, int64_t count, double weight = 1) {
  return {.samples = {{.first = first, .count = count, .weight = weight}}};
}

TEST(SampleOrder, OfOneLaneJoinsEpochs) {
  const SampleOrder order(4, {lane(0, 7)}, 3);
  EXPECT_EQ(order.samples_per_epoch(), 7);
  for (int64_t position = 0; position < 50; ++position)
    EXPECT_EQ(order.sample_at(position), shuffled_index(4, position / 7, 7, position % 7));
}

TEST(SampleOrder, EndlessStreamsTakeTheirLanesInTurn) {
  const SampleOrder order(4, {}, 3, 2);
  EXPECT_EQ(order.samples_per_epoch(), 0);
  for (int64_t position = 0; position < 30; ++position) {
    EXPECT_EQ(order.sample_at(position), position);
    EXPECT_EQ(order.batch_at(position).lane, position / 3 % 2);
  }
}

TEST(SampleOrder, ALaneOfSeveralRangesCountsThroughThem) {
  const SampleOrder order(9, {{.samples = {{.first = 3, .count = 2}, {.first = 10, .count = 3}}}}, 5);
  std::vector<int64_t> seen;
  for (int64_t position = 0; position < 5; ++position) seen.push_back(order.sample_at(position));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, (std::vector<int64_t>{3, 4, 10, 11, 12}));
}

// 10 samples of weight 1, 6 of weight 1.5 and 8 of weight 0.25: a pass takes 10, 9 and 2, and over eight
// passes each sample of a range has come equally often.
TEST(SampleOrder, WeightsSayHowOftenSamplesCome) {
  const SampleOrder order(4,
                          {{.samples = {{.first = 0, .count = 10},
                                        {.first = 10, .count = 6, .weight = 1.5},
                                        {.first = 16, .count = 8, .weight = 0.25}}}},
                          3);
  ASSERT_EQ(order.samples_per_epoch(), 21);
  std::map<int64_t, int64_t> counts;
  for (int64_t pass = 0; pass < 8; ++pass) {
    int64_t of_range[3] = {};
    for (int64_t place = 0; place < 21; ++place) {
      const int64_t sample = order.sample_at(pass * 21 + place);
      ++counts[sample];
      ++of_range[sample < 10 ? 0 : sample < 16 ? 1 : 2];
    }
    EXPECT_THAT(of_range, ::testing::ElementsAre(10, 9, 2));
  }
  for (const auto& [sample, count] : counts) EXPECT_EQ(count, sample < 10 ? 8 : sample < 16 ? 12 : 2);
}

// What begins later in the stream has passes of its own, from its first position on.
TEST(SampleOrder, MayBeginLater) {
  const SampleOrder order(4, {lane(0, 50)}, 5, 1, /*begin=*/35), first(4, {lane(0, 50)}, 5);
  std::set<int64_t> seen;
  int64_t same = 0;
  for (int64_t position = 35; position < 85; ++position) {
    seen.insert(order.sample_at(position));
    same += order.sample_at(position) == first.sample_at(position - 35);
  }
  EXPECT_EQ(seen.size(), 50u);
  EXPECT_LT(same, 10);
}

TEST(SampleOrder, RefusesAnEmptyLane) { EXPECT_THROW(SampleOrder(1, {lane(0, 4), lane(4, 0)}, 2), Error); }

// A random table of lanes, whose samples follow each other.
struct RandomLanes {
  std::vector<SampleLane> lanes;
  int64_t global_batch = 0, num_samples = 0;

  explicit RandomLanes(std::mt19937& random) {
    const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
    const int64_t num_lanes = 1 + below(6);
    global_batch = 1 + below(12);
    for (int64_t i = 0; i < num_lanes; ++i) {
      lanes.push_back(lane(num_samples, 1 + below(30), static_cast<double>(1 + below(5) / 4)));
      num_samples += lanes.back().samples[0].count;
    }
  }
  int64_t lane_of(int64_t sample) const {
    for (size_t i = 0; i < lanes.size(); ++i)
      if (sample < lanes[i].samples[0].first + lanes[i].samples[0].count) return static_cast<int64_t>(i);
    return -1;
  }
};

// Over 1,000 random tables: every batch is of one lane, every pass of a lane holds each of its samples as
// often as it repeats, after every epoch a lane is less than a batch behind, and any position can be asked
// for alone.
TEST(SampleOrder, KeepsItsPromisesForAnyLanes) {
  std::mt19937 random(5);
  for (int table = 0; table < 1000; ++table) {
    const RandomLanes given(random);
    const uint64_t seed = random();
    const SampleOrder order(seed, given.lanes, given.global_batch),
        again(seed, given.lanes, given.global_batch);
    constexpr int64_t kEpochs = 4;
    const int64_t batches = kEpochs * order.samples_per_epoch() / given.global_batch + 1;
    std::vector<std::vector<int64_t>> of_lanes(given.lanes.size());
    std::vector<int64_t> lane_of_batch;
    for (int64_t b = 0; b < batches; ++b) {
      const int64_t first = b * given.global_batch, lane = order.batch_at(first).lane;
      lane_of_batch.push_back(lane);
      std::vector<int64_t> rows(given.global_batch);
      for (int64_t row = 0; row < given.global_batch; ++row) {
        rows[row] = order.sample_at(first + row);
        ASSERT_EQ(given.lane_of(rows[row]), lane) << "table " << table;
      }
      auto& place = of_lanes[lane];
      const auto begin = static_cast<size_t>(order.batch_at(first).first);
      if (place.size() < begin + rows.size()) place.resize(begin + rows.size(), -1);
      std::copy(rows.begin(), rows.end(), place.begin() + static_cast<int64_t>(begin));
    }
    for (size_t i = 0; i < given.lanes.size(); ++i) {
      const int64_t pass = given.lanes[i].size();
      for (int64_t begin = 0; begin + pass <= static_cast<int64_t>(of_lanes[i].size()); begin += pass) {
        std::map<int64_t, int64_t> counts;
        bool is_whole = true;  // batches of the last epoch may not have been asked for
        for (int64_t p = begin; p < begin + pass; ++p) {
          is_whole &= of_lanes[i][p] >= 0;
          ++counts[of_lanes[i][p]];
        }
        if (!is_whole) continue;
        ASSERT_EQ(static_cast<int64_t>(counts.size()), given.lanes[i].samples[0].count) << "table " << table;
        for (const auto& [sample, count] : counts)
          ASSERT_EQ(count, given.lanes[i].samples[0].weight) << "table " << table;
      }
    }
    for (int64_t epoch = 1; epoch < kEpochs; ++epoch) {
      std::vector<int64_t> given_so_far(given.lanes.size());
      int64_t until = 0;
      for (const SampleLane& lane : given.lanes) until += epoch * lane.size() / given.global_batch;
      for (int64_t b = 0; b < until; ++b) given_so_far[lane_of_batch[b]] += given.global_batch;
      for (size_t i = 0; i < given.lanes.size(); ++i) {
        const int64_t behind = epoch * given.lanes[i].size() - given_so_far[i];
        ASSERT_TRUE(behind >= 0 && behind < given.global_batch) << "table " << table << " lane " << i;
      }
    }
    const int64_t somewhere = static_cast<int64_t>(random() % (batches * given.global_batch));
    EXPECT_EQ(again.sample_at(somewhere), order.sample_at(somewhere));
  }
}

}  // namespace
}  // namespace kiln
