// Which processors the ranks of a machine have.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Processors that the calling thread may run on: fewer than the machine's where a launcher, a container or
// taskset says so.
int64_t num_own_cpus();

// num_own_cpus() divided among the ranks that may run on the same ones: all of a machine, or this one alone
// where the launcher has given each rank its own. At least 1. A collective.
int64_t cpu_share(ProcessGroup& group);

// Where a rank may run: by number, ascending.
struct RankCpus {
  std::string host;
  std::vector<int> cpus;
};
// The same from what all ranks say of themselves.
int64_t cpu_share(const std::vector<RankCpus>& of_ranks, size_t rank);

}  // namespace kiln
