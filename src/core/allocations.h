// Every tensor allocation seen: a tracking allocator for CPU tensors (monitoring, the memory budget, measured
// peaks) and one for meta tensors, which allocates nothing and is what makes a dry run exact.
#pragma once
#include <cstddef>
#include <cstdint>

namespace at {
class Tensor;
}

namespace kiln {

// Hears of every allocation and free while it is attached. Calls come from the thread that allocates.
class AllocationObserver {
 public:
  virtual ~AllocationObserver() = default;
  virtual void allocated(uint64_t id, size_t bytes) = 0;  // ids are unique per process
  virtual void freed(uint64_t id, size_t bytes) = 0;
};

// Replaces the CPU allocator of the process by one that counts. Call once, at the start of main. Blocks are
// 64-byte aligned; a request of n bytes counts n.
void install_tracking_cpu_allocator();

struct LiveBytes {
  int64_t live = 0;  // tensors now
  int64_t peak = 0;  // the most since reset_peak_cpu_bytes()
};
LiveBytes live_cpu_bytes();
void reset_peak_cpu_bytes();
void observe_cpu_allocations(AllocationObserver* observer);  // null ends it

// The id under which the block behind a tensor's storage was announced; 0 when it came from elsewhere (memory
// of the caller, another device, an allocator of before).
uint64_t block_id(const at::Tensor& tensor);

// Installs the meta allocator (once per process, on first use) and sends its allocations to `observer` while
// in scope.
class MetaAllocationScope {
 public:
  explicit MetaAllocationScope(AllocationObserver& observer);
  ~MetaAllocationScope();
  MetaAllocationScope(const MetaAllocationScope&) = delete;
};

}  // namespace kiln
