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
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  // An error that has to name who is missing takes a few seconds: the ranks' heartbeats are compared.
  // REQUIRES: no dry run.
  [[noreturn]] void fail_with(const std::exception& error) const;
};

}  // namespace kiln
