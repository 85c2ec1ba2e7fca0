#include "core/allocations.h"
#include "core/aten.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace kiln {
namespace {

class Ledger : public AllocationObserver {
 public:
  void allocated(uint64_t id, size_t bytes) override {
    live_[id] = bytes;
    live_bytes += static_cast<int64_t>(bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
  }
  void freed(uint64_t id, size_t bytes) override {
    EXPECT_EQ(live_.at(id), bytes);
    live_.erase(id);
    live_bytes -= static_cast<int64_t>(bytes);
  }
  int64_t live_bytes = 0, peak_bytes = 0;

 private:
  std::map<uint64_t, size_t> live_;
};

// A chain whose peak is three tensors: x and y, then the sum before y dies.
void run_chain(at::Device device) {
  const at::Tensor x = at::empty({1000}, at::TensorOptions(device).dtype(at::kFloat));
  at::Tensor y = x * 2;
  y = y + x;
}

TEST(Allocations, CpuCountsLiveAndPeakBytes) {
  install_tracking_cpu_allocator();
  const int64_t before = live_cpu_bytes().live;
  reset_peak_cpu_bytes();
  run_chain(at::kCPU);
  EXPECT_EQ(live_cpu_bytes().live, before);
  EXPECT_EQ(live_cpu_bytes().peak - before, 3 * 4000);
  const at::Tensor aligned = at::empty({3});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(aligned.data_ptr()) % 64, 0u);
}

// Whether the kernel may hold this address in a huge page.
bool is_in_huge_pages(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::ifstream maps("/proc/self/smaps");
  bool is_there = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      is_there = begin <= address && address < end;
    if (is_there && line.starts_with("VmFlags:")) return line.find(" hg") != std::string::npos;
  }
  return false;
}

TEST(Allocations, HugePagesHoldLargeTensorsOnly) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage"))
    GTEST_SKIP() << "the kernel has no huge pages";
  install_tracking_cpu_allocator();
  const at::Tensor small = at::ones({1000}), large = at::ones({4'000'000});
  EXPECT_FALSE(is_in_huge_pages(small.data_ptr()));
  EXPECT_TRUE(is_in_huge_pages(large.data_ptr()));
}

TEST(Allocations, MetaSeesTheSameTraceWithoutMemory) {
  Ledger ledger;
  {
    const MetaAllocationScope scope(ledger);
    run_chain(at::kMeta);
  }
  EXPECT_EQ(ledger.live_bytes, 0);
  EXPECT_EQ(ledger.peak_bytes, 3 * 4000);
  run_chain(at::kMeta);  // outside the scope nobody listens
  EXPECT_EQ(ledger.peak_bytes, 3 * 4000);
}

}  // namespace
}  // namespace kiln
