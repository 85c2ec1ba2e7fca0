// Several ranks in one process: a thread each, with a real rendezvous and real Gloo connections between them.
#pragma once
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "parallel/process_group.h"

namespace kiln::test {

// Calls body(group) once per rank, all at once; throws what the first rank in order threw. `per_node`: ranks
// of each of several machines, as far as they know (0: all are on one).
inline void on_ranks(int64_t world_size, const std::function<void(std::shared_ptr<ProcessGroup>)>& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(60), int64_t per_node = 0) {
  if (world_size == 1) return body(std::make_shared<ProcessGroup>());
  // c10d's record of the last collectives is one per process and not made for several ranks in it: it
  // crashes.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  if (per_node > 0) setenv("GLOO_SOCKET_IFNAME", "lo", /*overwrite=*/1);  // else the host's name is looked up
  const Rendezvous rendezvous;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(ProcessGroup::connect({.rank = rank,
                                    .world_size = world_size,
                                    .local_rank = per_node > 0 ? rank % per_node : rank,
                                    .local_world_size = per_node > 0 ? per_node : world_size,
                                    .master_port = rendezvous.port(),
                                    .launcher_hosts = true},
                                   {.timeout = timeout}));
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace kiln::test
