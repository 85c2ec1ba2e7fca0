#include "data/store/sample_order.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

namespace kiln {
namespace {

std::string name_of(int64_t id) { return "pictures/" + std::to_string(id) + ".png"; }

std::vector<int64_t> pass_of(const std::vector<SampleLane>& lanes, int64_t samples) {
  const SampleOrder order(5, lanes, 1);
  std::vector<int64_t> ids;
  for (int64_t position = 0; position < samples; ++position) ids.push_back(order.sample_at(position));
  return ids;
}

TEST(SampleSplit, EverySampleBelongsToOneOfThem) {
  // Two lanes, one of which lies in two places.
  const std::vector<SampleLane> all = {
      {.samples = {{.first = 0, .count = 400}, {.first = 900, .count = 100}}},
      {.samples = {{.first = 400, .count = 500}}}};
  const auto training = split_lanes(all, 0.1, Split::kTraining, name_of);
  const auto held_out = split_lanes(all, 0.1, Split::kHeldOut, name_of);
  EXPECT_EQ(samples_per_pass(training) + samples_per_pass(held_out), 1000);
  EXPECT_NEAR(static_cast<double>(samples_per_pass(held_out)), 100, 30);
  std::set<int64_t> seen;
  for (const bool holds_out : {false, true})
    for (const size_t lane : {0, 1}) {
      const SampleLane& samples = (holds_out ? held_out : training)[lane];
      for (const int64_t id : pass_of({samples}, samples.size())) {
        EXPECT_TRUE(seen.insert(id).second) << id;
        EXPECT_EQ(is_held_out(name_of(id), 0.1), holds_out) << id;
        EXPECT_EQ(lane == 1, id >= 400 && id < 900) << id;
      }
    }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(SampleSplit, AGrowingDataSetMovesNone) {
  const std::vector<SampleLane> before = {{.samples = {{.first = 0, .count = 200}}}};
  const std::vector<SampleLane> after = {{.samples = {{.first = 0, .count = 300}}}};
  const auto ids = [&](const std::vector<SampleLane>& all) {
    return *split_lanes(all, 0.2, Split::kHeldOut, name_of)[0].samples[0].chosen;
  };
  const std::vector<int64_t> few = ids(before), many = ids(after);
  ASSERT_LT(few.size(), many.size());
  EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
}

TEST(SampleSplit, WeightsStay) {
  const std::vector<SampleLane> all = {{.samples = {{.first = 0, .count = 300, .weight = 2}}}};
  const auto training = split_lanes(all, 0.1, Split::kTraining, name_of);
  EXPECT_EQ(training[0].size(), 2 * training[0].samples[0].count);
  std::map<int64_t, int> times;
  for (const int64_t id : pass_of(training, training[0].size())) ++times[id];
  EXPECT_EQ(std::ssize(times), training[0].samples[0].count);
  for (const auto& [id, count] : times) {
    EXPECT_EQ(count, 2) << id;
    EXPECT_FALSE(is_held_out(name_of(id), 0.1));
  }
}

TEST(SampleSplit, AShareMayBeNothingOrNearlyAll) {
  const std::vector<SampleLane> all = {{.samples = {{.first = 0, .count = 20}}}};
  EXPECT_EQ(samples_per_pass(split_lanes(all, 1e-9, Split::kHeldOut, name_of)), 0);
  EXPECT_EQ(samples_per_pass(split_lanes(all, 1, Split::kTraining, name_of)), 0);
}

}  // namespace
}  // namespace kiln
