// What this process may still take of a device's memory.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace kiln {

// What of the free memory a component may count on, where the CPU's serves `num_processes` of this machine; 0
// where the system does not say.
int64_t usable_bytes(at::Device device, int64_t num_processes);

// What is left of a limit on the process's tensors, on a CPU on its resident memory, which holds more than
// tensors. Throws Error "--`option` ..." when that is nothing.
int64_t bytes_left_of(const char* option, const std::string& limit, at::Device device);

}  // namespace kiln
