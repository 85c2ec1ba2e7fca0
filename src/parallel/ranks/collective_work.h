// What a collective under way holds on to. For parallel/ only.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "parallel/ranks/connection.h"

namespace kiln {

struct Collective::Work {
  ProcessGroup* group;
  c10::intrusive_ptr<c10d::Work> work;  // null in a dry run
  std::vector<at::Tensor> tensors;      // alive while others read and write them
  std::string name;
  int64_t number;
  bool is_observed;  // not one of host values
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  // An error that has to name who is missing takes a few seconds: the ranks' heartbeats are compared.
  [[noreturn]] void fail_with(const std::exception& error) const;
};

}  // namespace kiln
