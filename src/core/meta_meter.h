// Counts what a dry run on meta tensors holds.
#pragma once
#include <algorithm>

#include "core/allocations.h"

namespace kiln {

struct MetaMeter : AllocationObserver {
  int64_t live = 0, peak = 0;  // bytes

  void allocated(uint64_t, size_t bytes) override {
    live += static_cast<int64_t>(bytes);
    peak = std::max(peak, live);
  }
  void freed(uint64_t, size_t bytes) override { live -= static_cast<int64_t>(bytes); }
};

}  // namespace kiln
