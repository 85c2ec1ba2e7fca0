#include "plan/price/calibrate.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>

#include "core/aten.h"
#include "parallel/ranks/process_group.h"
#include "parallel/ranks/rendezvous.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRanks = 2;
constexpr int64_t kSmallTensor = 1 << 10, kLargeTensor = 4 << 20;  // elements of f32
constexpr int kSmallTimes = 50, kLargeTimes = 8;

// Returns the least seconds of what a step does with a unit: its gradients are reduced, its weights gathered.
// Least, since whatever else runs on the machine only makes it longer.
double exchange_seconds(ProcessGroup& group, int64_t elements, int times) {
  const at::Tensor whole = at::ones({elements}), part = at::empty({elements / group.world_size()});
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < times; ++i) {
    group.barrier("a measurement");
    const auto begin = Clock::now();
    group.reduce_scatter(part, whole, "a measurement").wait();
    group.all_gather(whole, part, "a measurement").wait();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return least;
}

}  // namespace

RankLinks measure_rank_links() {
  const Rendezvous rendezvous;
  double small = 0, large = 0;
  std::exception_ptr error;  // the first one: what the other rank meets is its consequence
  std::once_flag has_error;
  const auto as_rank = [&](int64_t rank) {
    try {
      const at::NoGradGuard no_grad;
      const auto group = ProcessGroup::connect({.rank = rank,
                                                .world_size = kRanks,
                                                .local_rank = rank,
                                                .local_world_size = kRanks,
                                                .master_port = rendezvous.port(),
                                                .launcher_hosts = true,
                                                .secret = rendezvous.secret()},
                                               {.timeout = std::chrono::seconds(60)});
      const double of_small = exchange_seconds(*group, kSmallTensor, kSmallTimes),
                   of_large = exchange_seconds(*group, kLargeTensor, kLargeTimes);
      if (rank > 0) return;
      small = of_small;
      large = of_large;
    } catch (...) {
      std::call_once(has_error, [&] { error = std::current_exception(); });
    }
  };
  std::thread other(as_rank, 1);
  as_rank(0);
  other.join();
  if (error) std::rethrow_exception(error);
  // A reduce-scatter is an all-reduce here: two messages of half the bytes. A gathering is one.
  constexpr double kMessages = 3, kShare = 0.5;
  return {.hop_s = small / kMessages,
          .bytes_per_s =
              kMessages * kShare * kLargeTensor * sizeof(float) / std::max(large - small, 1e-3 * large)};
}

}  // namespace kiln
