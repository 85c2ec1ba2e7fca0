// Several ranks in one process: a thread each, with a real rendezvous and real Gloo connections between them.
#pragma once
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "parallel/ranks/process_group.h"
#include "parallel/ranks/rendezvous.h"

namespace kiln::test {

// A variable of the environment that has this value for as long as this lives.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, /*overwrite=*/1);
  }
  ~ScopedVariable() {
    if (before_)
      setenv(name_, before_->c_str(), /*overwrite=*/1);
    else
      unsetenv(name_);
  }
  ScopedVariable(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

using RankBody = std::function<void(std::shared_ptr<ProcessGroup>)>;

// Calls body(group) once per rank, all at once; throws what the first rank in order threw. `ranks_of_nodes`:
// on each of several machines, as far as the ranks know.
inline void on_nodes(const std::vector<int64_t>& ranks_of_nodes, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  std::vector<Ranks> all;
  for (const int64_t on_node : ranks_of_nodes)
    for (int64_t local_rank = 0; local_rank < on_node; ++local_rank)
      all.push_back({.rank = static_cast<int64_t>(all.size()),
                     .local_rank = local_rank,
                     .local_world_size = on_node,
                     .launcher_hosts = true});
  if (all.size() == 1) return body(std::make_shared<ProcessGroup>());
  // c10d's record of the last collectives is one per process and not made for several ranks in it: it
  // crashes.
  const ScopedVariable no_record("TORCH_FR_BUFFER_SIZE", "0");
  std::optional<ScopedVariable> loopback;  // else the host's name is looked up
  if (ranks_of_nodes.size() > 1) loopback.emplace("GLOO_SOCKET_IFNAME", "lo");
  const Rendezvous rendezvous;
  std::vector<std::exception_ptr> errors(all.size());
  std::vector<std::thread> threads;
  for (Ranks& ranks : all) {
    ranks.world_size = static_cast<int64_t>(all.size());
    ranks.master_port = rendezvous.port();
    ranks.secret = rendezvous.secret();
    threads.emplace_back([&] {
      try {
        body(ProcessGroup::connect(ranks, {.timeout = timeout}));
      } catch (...) {
        errors[static_cast<size_t>(ranks.rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

// What each rank throws, "" where it does not.
inline std::vector<std::string> errors_of_nodes(const std::vector<int64_t>& ranks_of_nodes,
                                                const RankBody& body) {
  std::vector<std::string> errors;
  for (const int64_t on_node : ranks_of_nodes) errors.resize(errors.size() + static_cast<size_t>(on_node));
  on_nodes(ranks_of_nodes, [&](const std::shared_ptr<ProcessGroup>& group) {
    try {
      body(group);
    } catch (const Error& error) {
      errors[static_cast<size_t>(group->rank())] = error.what();
    }
  });
  return errors;
}
inline std::vector<std::string> errors_of_ranks(int64_t world_size, const RankBody& body) {
  return errors_of_nodes({world_size}, body);
}

// Calls body(group) with a rank that is alone and yet connected, its tensors on `device`.
inline void alone_connected(at::Device device, const RankBody& body) {
  const ScopedVariable no_record("TORCH_FR_BUFFER_SIZE", "0");
  const Rendezvous rendezvous;
  const Ranks ranks{.master_port = rendezvous.port(), .launcher_hosts = true, .secret = rendezvous.secret()};
  body(ProcessGroup::connect(
      ranks, {.device = device, .timeout = std::chrono::seconds(60), .connects_alone = true}));
}

// The same on one machine.
inline void on_ranks(int64_t world_size, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  on_nodes({world_size}, body, timeout);
}

}  // namespace kiln::test
