// Host memory: what this process may still take, of what the machine has and what its control groups allow,
// and what its heap keeps.
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

// Makes freed memory go back to the system at once, instead of waiting for its next use, and new memory come
// in small pages. Resident memory is then what is in use. This costs page faults. With an allocator other
// than jemalloc it only makes the pages small.
void return_freed_memory();

// Gives memory that is free now back to the system, once. It is for the end of what is rare and needs memory
// of its own: a step would fault its pages in anew. With an allocator other than jemalloc it does nothing.
void trim_heap();

// Does so only where blocks below 2 MiB lie, of which a step of a large model faults little in anew. It is
// for what makes many small blocks every minute, as a report does.
void trim_small_blocks();

}  // namespace kiln
