#include "data/images/bucket_assignment.h"

#include <cmath>
#include <random>
#include <set>

#include "data/store/sample_order.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(BucketAssignment, LeavesOutWhatIsEmptyTooSmallOrUnknown) {
  const std::vector<Bucket> table = parse_buckets("64x64,32x64,64x32", 64, 8);
  const BucketAssignment assignment =
      assign_buckets(table, {{70, 70}, {100, 200}, {0, 0}, {63, 64}, {64, 64}, {32, 63}}, 1, false);
  ASSERT_EQ(assignment.filled.size(), 2u);
  EXPECT_THAT(assignment.filled[0].pictures, ElementsAre(0, 4));
  EXPECT_THAT(assignment.filled[1].pictures, ElementsAre(1));
  EXPECT_THAT(assignment.too_small, ElementsAre(3, 5));
  const std::string text = assignment_text(assignment);
  EXPECT_THAT(text, has_all("64x64   1.00           2   66.7 %\n", "32x64   0.50           1   33.3 %\n",
                            "without pictures, and left out: 64x32\n"));
  EXPECT_EQ(assign_buckets(table, {{63, 64}, {32, 63}}, 1, true).num_pictures(), 2);
}

TEST(BucketAssignment, SmallBucketsJoinOthersAndSayIt) {
  const std::vector<Bucket> table = parse_buckets("64x64,32x64", 64, 8);
  const BucketAssignment assignment = assign_buckets(table, {{70, 70}, {100, 200}, {64, 64}}, 2, false);
  ASSERT_EQ(assignment.filled.size(), 1u);
  EXPECT_THAT(assignment.filled[0].pictures, ElementsAre(0, 1, 2));
  EXPECT_EQ(assignment.filled[0].num_joined, 1);
  EXPECT_THAT(assignment_text(assignment), has_all("1 of them from small buckets", "joined others: 32x64\n"));
  EXPECT_ERROR(assign_buckets(table, {{70, 70}, {100, 200}}, 3, false),
               "--bucket-min 3 is more than the 2 pictures");
}

// Over 1,000 random tables and sets of pictures, each as the lanes of a store.
TEST(BucketAssignment, EachPictureComesOncePerPassInFullBatchesOfItsBucket) {
  std::mt19937 random(3);
  const auto from_to = [&](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
  };
  for (int trial = 0; trial < 1000; ++trial) {
    std::vector<Bucket> table;
    std::set<double> keys;
    for (int64_t i = from_to(1, 12); i > 0; --i) {
      const Bucket bucket =
          parse_buckets(fmt::format("{}x{}", 8 * from_to(1, 12), 8 * from_to(1, 12)), 0, 8)[0];
      if (keys.insert(bucket.aspect_ratio).second) table.push_back(bucket);
    }
    std::vector<PictureSize> sizes(static_cast<size_t>(from_to(1, 200)));
    for (PictureSize& size : sizes) size = {from_to(0, 300), from_to(1, 300)};
    const int64_t least = from_to(1, 20);
    const bool enlarge = random() % 2;
    BucketAssignment assignment;
    try {
      assignment = assign_buckets(table, sizes, least, enlarge);
    } catch (const Error& error) {
      ASSERT_THAT(error.what(), HasSubstr("--bucket-min"));
      continue;
    }

    // Every picture is in one bucket, is too small, or has no size.
    std::vector<int> times(sizes.size());
    for (const int64_t picture : assignment.too_small) ++times[picture];
    std::vector<SampleLane> lanes;
    std::vector<int64_t> picture_of_sample, lane_of_sample;
    for (const auto& [bucket, pictures, num_joined] : assignment.filled) {
      ASSERT_GE(static_cast<int64_t>(pictures.size()), assignment.filled.size() > 1 ? least : 1);
      ASSERT_TRUE(std::is_sorted(pictures.begin(), pictures.end()));
      int64_t num_others = 0;
      for (const int64_t picture : pictures) {
        const PictureSize& size = sizes[picture];
        ++times[picture];
        ASSERT_TRUE(enlarge || (size.height >= bucket.height && size.width >= bucket.width));
        num_others +=
            table[nearest_bucket(table, size.height, size.width)].aspect_ratio != bucket.aspect_ratio;
        lane_of_sample.push_back(static_cast<int64_t>(lanes.size()));
      }
      ASSERT_EQ(num_joined, num_others);
      lanes.push_back({.samples = {{.first = static_cast<int64_t>(picture_of_sample.size()),
                                    .count = static_cast<int64_t>(pictures.size())}}});
      picture_of_sample.insert(picture_of_sample.end(), pictures.begin(), pictures.end());
    }
    for (size_t i = 0; i < sizes.size(); ++i) ASSERT_EQ(times[i], sizes[i].is_known() ? 1 : 0) << trial;
    ASSERT_TRUE(!enlarge || assignment.too_small.empty());
    if (lanes.empty()) continue;

    const int64_t global_batch = from_to(1, 9), world_size = from_to(1, 3);
    const uint64_t seed = random();
    std::vector<SampleOrder> of_ranks(world_size, SampleOrder(seed, lanes, global_batch));
    std::vector<int64_t> seen(picture_of_sample.size());
    // As many passes as make whole batches in every lane.
    const int64_t num_batches = global_batch * of_ranks[0].samples_per_epoch() / global_batch;
    for (int64_t batch = 0; batch < num_batches; ++batch) {
      const int64_t lane = of_ranks[0].batch_at(batch * global_batch).lane;
      for (int64_t row = 0; row < global_batch; ++row) {
        const int64_t position = batch * global_batch + row;
        const int64_t sample = of_ranks[row % world_size].sample_at(position);
        ASSERT_EQ(sample, of_ranks[0].sample_at(position));
        ASSERT_EQ(lane_of_sample[sample], lane);
        ++seen[sample];
      }
    }
    for (const int64_t count : seen) ASSERT_EQ(count, global_batch) << trial;
  }
}

}  // namespace
}  // namespace kiln
