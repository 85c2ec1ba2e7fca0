// Processors: how the ranks of a machine share them, and who uses them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Returns how many processors the calling thread may keep busy: those that it may run on, of which a
// launcher, a container or taskset may allow fewer than the machine has, and no more than the control groups'
// quota, rounded up. `root`: the folder of proc and sys, if not /.
int64_t num_own_cpus(const std::string& root = "");

// Returns num_own_cpus() divided by the number of ranks that may run on the same processors: all ranks of a
// machine, or this one alone if the launcher gave each rank its own. At least 1. A collective.
int64_t cpu_share(ProcessGroup& group);

// The host of a rank, the numbers of the processors that it may run on, ascending, and how many of them it
// may keep busy; 0: all.
struct RankCpus {
  std::string host;
  std::vector<int> cpus;
  int64_t quota = 0;
};
// The same, from what all ranks report.
int64_t cpu_share(const std::vector<RankCpus>& of_ranks, size_t rank);

// Seconds up to now. All but `wall` are sums over this process's threads.
struct ProcessorTimes {
  double wall = 0;
  double running = 0;  // on a processor
  double waiting = 0;  // ready to run while others had the processors; 0 where the system does not say

  ProcessorTimes since(const ProcessorTimes& before) const {
    return {
        .wall = wall - before.wall, .running = running - before.running, .waiting = waiting - before.waiting};
  }
};
// Reads a small file for each thread: some 10 microseconds each.
ProcessorTimes processor_times();

// Returns the number of this run's processes on this machine, as the launcher says.
int64_t ranks_here();
// Returns how many processors that many threads of this process can have at once if the ranks of this machine
// share them evenly.
double processors_of(int64_t threads, int64_t ranks = ranks_here());
// Returns the share of the time of so many processors that others had in an interval, 0 to 1. Idle
// processors count for nobody, and neither do this run's own threads that take turns.
double taken_share(const ProcessorTimes& spent, double processors);
// Returns "other programs had 43 % of the processors' time", or "" if it was so little that it may be chance.
std::string taken_text(double share);

}  // namespace kiln
