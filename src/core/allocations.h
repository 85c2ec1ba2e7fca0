// Allocators that report every tensor allocation: one for CPU tensors (monitoring, the memory budget,
// measured peaks) and one for meta tensors, which allocates nothing and makes dry runs exact.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace at {
class Tensor;
}

namespace kiln {

// Is called for every allocation and free while it is attached, on the thread that makes it.
class AllocationObserver {
 public:
  virtual ~AllocationObserver() = default;
  virtual void allocated(uint64_t id, size_t bytes) = 0;  // ids are unique per process
  virtual void freed(uint64_t id, size_t bytes) = 0;
};

// Replaces the process's CPU allocator with one that counts. Call once, at the start of main. Blocks are
// 64-byte aligned; a request of n bytes counts n.
void install_tracking_cpu_allocator();

struct LiveBytes {
  int64_t live = 0;  // bytes of tensors now
  int64_t peak = 0;  // the most since reset_peak_cpu_bytes()
};
LiveBytes live_cpu_bytes();
void reset_peak_cpu_bytes();
void observe_cpu_allocations(AllocationObserver* observer);  // null ends it

// Returns the id that was reported for the block behind a tensor's storage. Returns 0 if the block came from
// elsewhere: the caller's own memory, another device, or an earlier allocator.
uint64_t block_id(const at::Tensor& tensor);

// Installs the meta allocator (once per process, on first use) and sends its allocations to `observer` while
// in scope.
class MetaAllocationScope {
 public:
  explicit MetaAllocationScope(AllocationObserver& observer);
  ~MetaAllocationScope();
  MetaAllocationScope(const MetaAllocationScope&) = delete;
};

// Counts the bytes that a dry run on meta tensors holds.
struct MetaMeter : AllocationObserver {
  int64_t live = 0, peak = 0;

  void allocated(uint64_t, size_t bytes) override {
    live += static_cast<int64_t>(bytes);
    peak = std::max(peak, live);
  }
  void freed(uint64_t, size_t bytes) override { live -= static_cast<int64_t>(bytes); }
};

}  // namespace kiln
