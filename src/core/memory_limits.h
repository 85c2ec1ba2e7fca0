// Host memory that this process may still take: what the machine has, and what its control groups allow.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct HostMemory {
  int64_t total_bytes = 0;      // the machine's, or the lowest limit
  int64_t available_bytes = 0;  // without swapping; cached files count, which give way
};

// 0 where the system does not say. Every group above the process counts, of both versions of control groups.
// `root`: where /proc and /sys are looked for.
HostMemory host_memory(const std::string& root = "");

}  // namespace kiln
