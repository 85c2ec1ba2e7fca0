#include "parallel/cpu_share.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

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

}  // namespace

int64_t num_own_cpus() { return static_cast<int64_t>(own_cpus().size()); }

int64_t cpu_share(const std::vector<RankCpus>& of_ranks, size_t rank) {
  const RankCpus& own = of_ranks.at(rank);
  const int64_t sharing =
      std::ranges::count_if(of_ranks, [&](const RankCpus& other) { return share_a_cpu(own, other); });
  return std::max<int64_t>(1, static_cast<int64_t>(own.cpus.size()) / std::max<int64_t>(1, sharing));
}

int64_t cpu_share(ProcessGroup& group) {
  const nlohmann::json mine = {{"host", host_name()}, {"cpus", own_cpus()}};
  std::vector<RankCpus> of_ranks;
  for (const std::string& text : group.gather(mine.dump(), "the processors of each rank")) {
    const nlohmann::json rank = nlohmann::json::parse(text);
    of_ranks.push_back({.host = rank.at("host"), .cpus = rank.at("cpus")});
  }
  return cpu_share(of_ranks, static_cast<size_t>(group.rank()));
}

}  // namespace kiln
