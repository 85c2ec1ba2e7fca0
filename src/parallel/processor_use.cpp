#include "parallel/processor_use.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "parallel/cpu_share.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

namespace {

// Sums what the scheduler counts for each thread: nanoseconds on a processor, nanoseconds ready to run, and
// the number of turns.
double seconds_waiting() {
  double nanoseconds = 0;
  std::error_code none;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", none)) {
    std::ifstream file(thread.path() / "schedstat");
    if (double running = 0, waiting = 0; file >> running >> waiting) nanoseconds += waiting;
  }
  return 1e-9 * nanoseconds;
}

}  // namespace

ProcessorTimes processor_times() {
  return {.wall = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(),
          .running = static_cast<double>(std::clock()) / CLOCKS_PER_SEC,
          .waiting = seconds_waiting()};
}

int64_t ranks_here() {
  static const int64_t ranks = ranks_from_environment().local_world_size;
  return ranks;
}

double processors_of(int64_t threads, int64_t ranks) {
  return std::min(static_cast<double>(threads),
                  static_cast<double>(num_own_cpus()) / static_cast<double>(ranks));
}

// Work of a single thread leaves processors free, and too many threads of its own, or ranks of its run, make
// a process wait for them. So others had neither more than is missing nor more than was waited for.
double taken_share(const ProcessorTimes& spent, double processors) {
  const double all = spent.wall * processors;
  return all > 0 ? std::clamp(std::min(spent.waiting, all - spent.running) / all, 0.0, 1.0) : 0;
}

std::string taken_text(double share) {
  constexpr double kMuch = 0.1;
  return share < kMuch ? "" : fmt::format("other programs had {:.0f} % of the processors' time", 100 * share);
}

}  // namespace kiln
