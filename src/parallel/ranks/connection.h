// What connects the ranks of a group: their rendezvous, heartbeats and c10d's backends. For parallel/ only.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "parallel/ranks/heartbeat.h"
#include "parallel/ranks/process_group_options.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

struct GroupConnection {
  using Clock = std::chrono::steady_clock;

  c10::intrusive_ptr<c10d::Store> store;
  ProcessGroupOptions options;
  c10::intrusive_ptr<c10d::Backend> host, device;
  std::shared_ptr<Heartbeat> heartbeat;  // of all ranks, in a subgroup too
  int64_t num_subgroups = 0;             // made so far: each has keys of its own
  bool is_broken = false;                // a collective failed

  ~GroupConnection();
  c10d::Backend& of(const at::Tensor& tensor) { return tensor.is_cpu() ? *host : *device; }
  // How long to wait for ranks that are still to come or to connect.
  std::chrono::milliseconds patience() const;
  // `ranks`: this rank among the group's members. Their keys in the store begin with `prefix`.
  void open_backends(const std::string& prefix, const Ranks& ranks);
  // Makes the first collective while it watches the other ranks. NCCL connects the ranks in it, and would
  // wait for ever for one that does not come. Throws Error naming those that are missing.
  void make_first_collective();
  // Throws MissingRanks.
  [[noreturn]] void fail_missing(const std::string& what, Clock::duration lasted, const std::string& why);
};

// Opens Gloo for rank `members.rank` of `members.world_size`. Chooses the interface that GLOO_SOCKET_IFNAME
// names. Without it, chooses a loopback interface if all ranks of the run, `all`, are on this machine, else
// the one that packets to the rendezvous leave from. Throws if there is none.
c10::intrusive_ptr<c10d::Backend> open_gloo(c10::intrusive_ptr<c10d::Store> store, const Ranks& members,
                                            const Ranks& all, std::chrono::milliseconds patience);

}  // namespace kiln
