#include "plan/memory/caching_allocator.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(CachingAllocatorReplay, RoundsBlocksTo512Bytes) {
  CachingAllocatorReplay replay;
  ASSERT_TRUE(replay.allocate(1, 1));
  ASSERT_TRUE(replay.allocate(2, 513));
  EXPECT_EQ(replay.allocated_bytes(), 512 + 1024);
  ASSERT_TRUE(replay.allocate(3, 0));  // an empty tensor takes nothing
  EXPECT_EQ(replay.allocated_bytes(), 512 + 1024);
}

TEST(CachingAllocatorReplay, SegmentsAre2Or20MiBOrTheBlocksOwn) {
  CachingAllocatorReplay replay;
  replay.allocate(1, kMiB);
  EXPECT_EQ(replay.reserved_bytes(), 2 * kMiB);
  replay.allocate(2, kMiB + 1);
  EXPECT_EQ(replay.reserved_bytes(), 22 * kMiB);
  replay.allocate(3, 33 * kMiB + 1);
  EXPECT_EQ(replay.reserved_bytes(), (22 + 34) * kMiB);
}

TEST(CachingAllocatorReplay, SplitsAndReusesTheBestFit) {
  CachingAllocatorReplay replay;
  replay.allocate(1, 5 * kMiB);
  replay.allocate(2, 5 * kMiB);  // from the rest of the first segment
  EXPECT_EQ(replay.reserved_bytes(), 20 * kMiB);
  replay.free(1);
  replay.allocate(3, 4 * kMiB);  // the 5 MiB hole fits better than the 10 MiB rest
  replay.allocate(4, 10 * kMiB);
  EXPECT_EQ(replay.reserved_bytes(), 20 * kMiB);
}

TEST(CachingAllocatorReplay, MergesNeighboursAndKeepsSegments) {
  CachingAllocatorReplay replay;
  for (uint64_t id = 1; id <= 4; ++id) replay.allocate(id, 5 * kMiB);
  for (uint64_t id : {2, 4, 1, 3}) replay.free(id);
  EXPECT_EQ(replay.allocated_bytes(), 0);
  EXPECT_EQ(replay.reserved_bytes(), 20 * kMiB);
  replay.allocate(5, 20 * kMiB);  // the merged whole
  EXPECT_EQ(replay.reserved_bytes(), 20 * kMiB);
  EXPECT_EQ(replay.peak_allocated_bytes(), 20 * kMiB);
}

TEST(CachingAllocatorReplay, ReusesABlockOnItsStreamAlone) {
  CachingAllocatorReplay replay;
  replay.allocate(1, 5 * kMiB, /*stream=*/0);
  replay.free(1);
  replay.allocate(2, 5 * kMiB, /*stream=*/1);
  EXPECT_EQ(replay.reserved_bytes(), 40 * kMiB) << "another stream's segment is not used, though it is free";
  replay.allocate(3, 5 * kMiB, /*stream=*/0);
  replay.allocate(4, 5 * kMiB, /*stream=*/1);
  EXPECT_EQ(replay.reserved_bytes(), 40 * kMiB) << "its own is";
  for (uint64_t id : {2, 3, 4}) replay.free(id);
  replay.allocate(5, 20 * kMiB, /*stream=*/1);  // the merged whole
  EXPECT_EQ(replay.reserved_bytes(), 40 * kMiB);

  CachingAllocatorReplay small(32 * kMiB);  // what is cached is given back whatever the stream
  small.allocate(1, 20 * kMiB, /*stream=*/1);
  small.free(1);
  EXPECT_TRUE(small.allocate(2, 30 * kMiB, /*stream=*/0));
}

TEST(CachingAllocatorReplay, GivesCachedSegmentsBackBeforeItRefuses) {
  CachingAllocatorReplay replay(64 * kMiB);
  replay.allocate(1, 40 * kMiB);
  replay.free(1);
  EXPECT_TRUE(replay.allocate(2, 50 * kMiB));  // the cached 40 MiB had to go
  EXPECT_EQ(replay.reserved_bytes(), 50 * kMiB);
  EXPECT_FALSE(replay.allocate(3, 20 * kMiB));
  EXPECT_TRUE(replay.allocate(4, 12 * kMiB));
  EXPECT_EQ(replay.peak_reserved_bytes(), 62 * kMiB);
}

// What other settings of the allocator would reserve, the replay does not know: a plan says so.
TEST(CachingAllocatorReplay, UnusualSettingsAreNamed) {
  const auto settings = [](const char* older, const char* newer = nullptr) {
    return unusual_allocator_settings(
        [=](const char* name) { return std::string(name) == "PYTORCH_ALLOC_CONF" ? newer : older; });
  };
  EXPECT_EQ(settings(nullptr), "");
  EXPECT_EQ(settings(""), "");
  EXPECT_EQ(settings("expandable_segments:False, backend:native"), "");
  EXPECT_EQ(settings("pinned_use_background_threads:True"), "") << "of pinned memory";
  EXPECT_EQ(settings("expandable_segments:True"), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
  EXPECT_EQ(settings("backend:native,max_split_size_mb:128"),
            "PYTORCH_CUDA_ALLOC_CONF=backend:native,max_split_size_mb:128");
  EXPECT_EQ(settings("expandable_segments:True", "backend:cudaMallocAsync"),
            "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync");
  EXPECT_EQ(settings("expandable_segments:True", ""), "") << "the newer name goes first";
}

}  // namespace
}  // namespace kiln
