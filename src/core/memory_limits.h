// Host memory that this process may still take: what the machine has, and what its control groups allow.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct HostMemory {
  int64_t total_bytes = 0;      // the machine's, or the lowest limit
  int64_t available_bytes = 0;  // without swapping; cached files count as available
};

// Returns 0 for what the system does not report. The limits of every control group above the process count,
// of both versions. `root`: the folder of proc and sys, if not /.
HostMemory host_memory(const std::string& root = "");

}  // namespace kiln
