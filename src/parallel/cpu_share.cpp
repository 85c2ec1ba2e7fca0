#include "parallel/cpu_share.h"

#include <sched.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>

#include "core/control_groups.h"
#include "core/files/entries.h"
#include "core/json.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

namespace {

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};

// Returns the numbers of the processors that this thread may run on.
std::vector<int> own_cpus() {
  constexpr size_t kMostCpus = 1 << 14;
  const std::unique_ptr<cpu_set_t, FreeCpuSet> set(CPU_ALLOC(kMostCpus));
  const size_t size = CPU_ALLOC_SIZE(kMostCpus);
  std::vector<int> cpus;
  if (set && sched_getaffinity(0, size, set.get()) == 0) {
    for (size_t cpu = 0; cpu < kMostCpus; ++cpu)
      if (CPU_ISSET_S(cpu, size, set.get())) cpus.push_back(static_cast<int>(cpu));
  } else {  // the system does not say
    const int all = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int cpu = 0; cpu < all; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

bool share_a_cpu(const RankCpus& a, const RankCpus& b) {
  std::vector<int> common;
  std::ranges::set_intersection(a.cpus, b.cpus, std::back_inserter(common));
  return a.host == b.host && !common.empty();
}

// Sums what the scheduler counts for each thread: nanoseconds on a processor, nanoseconds ready to run, and
// the number of turns.
double seconds_waiting() {
  double nanoseconds = 0;
  for (const auto& thread : readable_entries_of("/proc/self/task")) {
    std::ifstream file(thread.path() / "schedstat");
    if (double running = 0, waiting = 0; file >> running >> waiting) nanoseconds += waiting;
  }
  return 1e-9 * nanoseconds;
}

}  // namespace

int64_t num_own_cpus(const std::string& root) {
  const auto allowed = static_cast<int64_t>(own_cpus().size());
  const std::optional<double> quota = cpu_quota(root);
  return quota ? std::clamp<int64_t>(static_cast<int64_t>(std::ceil(*quota)), 1, allowed) : allowed;
}

int64_t cpu_share(const std::vector<RankCpus>& of_ranks, size_t rank) {
  const RankCpus& own = of_ranks.at(rank);
  const int64_t sharing =
      std::ranges::count_if(of_ranks, [&](const RankCpus& other) { return share_a_cpu(own, other); });
  const int64_t processors =
      std::min(static_cast<int64_t>(own.cpus.size()), own.quota > 0 ? own.quota : INT64_MAX);
  return std::max<int64_t>(1, processors / std::max<int64_t>(1, sharing));
}

int64_t cpu_share(ProcessGroup& group) {
  const nlohmann::json mine = {{"host", host_name()}, {"cpus", own_cpus()}, {"quota", num_own_cpus()}};
  std::vector<RankCpus> of_ranks;
  for (const std::string& text : group.gather(mine.dump(), "the processors of each rank")) {
    const nlohmann::json rank = nlohmann::json::parse(text);
    of_ranks.push_back({.host = rank.at("host"), .cpus = rank.at("cpus"), .quota = rank.at("quota")});
  }
  return cpu_share(of_ranks, static_cast<size_t>(group.rank()));
}

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
