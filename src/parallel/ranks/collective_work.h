// The state of a collective under way. For parallel/ only.
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
  // Where the group keeps its observer, which may change until the wait; null for host values.
  CollectiveObserver* const* observer;
  c10::intrusive_ptr<c10d::Work> work;  // null in a dry run
  std::vector<at::Tensor> tensors;      // kept alive while others read and write them
  std::string name;
  int64_t number;
  at::Tensor sums{};  // this rank's part of a reduce-scatter by Gloo, which adds up all parts on every rank
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  // Returns when it is done and tensors[0] holds its result. Throws the error if it failed. REQUIRES: no dry
  // run.
  void wait();
  // Waits while it watches the ranks, and throws MissingRanks for those that are gone. Gloo itself fails at
  // once when another rank dies, with one exception: a send that begins while its connection is being closed
  // waits for ever.
  void look_after_ranks();
  // Throws an error that names who is missing. Comparing the ranks' heartbeats takes a few seconds. REQUIRES:
  // no dry run.
  [[noreturn]] void fail_with(const std::exception& error) const;
};

}  // namespace kiln
