// How the ranks of a group meet.
#pragma once
#include <c10/core/Device.h>

#include <chrono>

namespace kiln {

struct ProcessGroupOptions {
  c10::Device device = c10::kCPU;  // of the tensors that are reduced and gathered
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Makes a single rank connect to itself, so that its collectives go through c10d as those of several ranks
  // do. With one GPU that is the only way to run NCCL.
  bool connects_alone = false;
  bool deterministic = false;  // NCCL adds in the same order each time
};

}  // namespace kiln
