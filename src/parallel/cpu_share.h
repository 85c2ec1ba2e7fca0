// How the ranks of a machine share its processors.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Returns how many processors the calling thread may run on. A launcher, a container or taskset may allow
// fewer than the machine has.
int64_t num_own_cpus();

// Returns num_own_cpus() divided by the number of ranks that may run on the same processors: all ranks of a
// machine, or this one alone if the launcher gave each rank its own. At least 1. A collective.
int64_t cpu_share(ProcessGroup& group);

// The host of a rank and the numbers of the processors that it may run on, ascending.
struct RankCpus {
  std::string host;
  std::vector<int> cpus;
};
// The same, from what all ranks report.
int64_t cpu_share(const std::vector<RankCpus>& of_ranks, size_t rank);

}  // namespace kiln
