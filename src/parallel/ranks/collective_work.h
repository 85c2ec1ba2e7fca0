// What a collective under way holds on to. For parallel/ only.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace kiln {

class CollectiveObserver;
struct GroupConnection;

struct CollectiveWork {
  GroupConnection* connection;  // of the group; null in a dry run
  // Where the ranks keep their observer, which may change until the wait; null for host values.
  CollectiveObserver* const* observer;
  c10::intrusive_ptr<c10d::Work> work;  // null in a dry run
  std::vector<at::Tensor> tensors;      // alive while others read and write them
  std::string name;
  int64_t number;
  at::Tensor sums{};  // of a reduce-scatter by Gloo, which adds up all parts on every rank: this rank's
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  // Returns when it is done and tensors[0] holds its result; throws what made it fail. REQUIRES: no dry run.
  void wait();
  // Gloo fails at once when another rank dies, but for one moment: a send that begins while its connection is
  // being closed is never told, and waits for ever. Waits, too, and throws MissingRanks for ranks that are
  // gone.
  void look_after_ranks();
  // An error that has to name who is missing takes a few seconds: the ranks' heartbeats are compared.
  // REQUIRES: no dry run.
  [[noreturn]] void fail_with(const std::exception& error) const;
};

}  // namespace kiln
