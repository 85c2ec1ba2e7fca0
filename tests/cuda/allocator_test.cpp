// The plan's replay of the caching allocator against the allocator itself: a training's allocations, as it
// recorded them.
#include <c10/cuda/CUDACachingAllocator.h>

#include <map>

#include "cuda/gpu_test.h"
#include "plan/memory/caching_allocator.h"
#include "train/placements.h"

namespace kiln {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Entry = allocator::TraceEntry;
using test::kGpu;

class CudaAllocator : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (const std::string settings = unusual_allocator_settings(); !settings.empty())
      GTEST_SKIP() << "the replay is of the default settings, not of " << settings;
    allocator::emptyCache();
    if (allocator::getDeviceStats(0).reserved_bytes[0].current != 0)
      GTEST_SKIP()
          << "an earlier test still holds memory: the replay would not begin where the allocator does "
             "(--gtest_filter=CudaAllocator.*)";
    record(true);
  }
  static void record(bool on) {
    allocator::recordHistory(on, nullptr, 1 << 20, allocator::RecordContext::NEVER, /*clearHistory=*/on, {});
  }

  // Plays what was recorded, and compares after every event.
  static void expect_replay() {
    const auto snapshot = allocator::snapshot();
    record(false);
    ASSERT_FALSE(snapshot.device_traces.empty());
    CachingAllocatorReplay replay;
    int64_t reserved = 0, num_allocations = 0, num_wrong = 0;
    std::map<void*, int64_t> streams;
    for (const Entry& entry : snapshot.device_traces.front()) {
      const auto stream = streams.try_emplace(entry.stream_, streams.size()).first->second;
      const auto bytes = static_cast<int64_t>(entry.size_);
      switch (entry.action_) {
        case Entry::SEGMENT_ALLOC:  // comes before the allocation that it is for
          reserved += bytes;
          break;
        case Entry::SEGMENT_FREE:
          FAIL() << "segments were given back: the device is too full for this test";
        case Entry::ALLOC:
          ASSERT_TRUE(replay.allocate(entry.addr_, bytes, stream));
          ++num_allocations;
          num_wrong += replay.reserved_bytes() != reserved;
          break;
        case Entry::FREE_COMPLETED:
          replay.free(entry.addr_);
          break;
        default:
          break;
      }
    }
    EXPECT_GT(num_allocations, 100);
    EXPECT_EQ(num_wrong, 0) << "of " << num_allocations << " allocations";
    EXPECT_EQ(replay.reserved_bytes(), reserved);
  }
};

TEST_F(CudaAllocator, ReplaysATraining) {
  {
    const test::TinyTraining tiny(
        {.device = kGpu, .compute_dtype = at::kBFloat16, .micro_batch = 16, .max_grad_norm = 1});
    test::take_steps(tiny, 48, 0, 3);
  }
  expect_replay();
}

TEST_F(CudaAllocator, ReplaysBlocksOfAllSizes) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  std::vector<at::Tensor> held(40);
  for (int i = 0; i < 1000; ++i) {
    const double drawn = at::rand({2}, generator).select(0, 0).item<double>();
    const auto bytes = static_cast<int64_t>(std::exp2(9 + 17 * drawn));  // 512 bytes to 64 MiB
    held[static_cast<size_t>(i * 7919 % 40)] = at::empty({bytes}, at::TensorOptions(kGpu).dtype(at::kByte));
  }
  held.clear();
  expect_replay();
}

}  // namespace
}  // namespace kiln
