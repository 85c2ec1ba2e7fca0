// How much of the processors' time other programs take from this process.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

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

// Returns how many processors that many threads of this process can have at once.
int64_t processors_of(int64_t threads);
// Returns the share of the time of so many processors that others had in an interval, 0 to 1. Idle
// processors count for nobody, and neither do this process's own threads that take turns.
double taken_share(const ProcessorTimes& spent, int64_t processors);
// Returns "other programs had 43 % of the processors' time", or "" if it was so little that it may be chance.
std::string taken_text(double share);

}  // namespace kiln
