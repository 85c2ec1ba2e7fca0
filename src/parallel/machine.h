// What the machine is, what it holds and how fast it multiplies.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace kiln {

// "auto" (cuda where there is one), "cpu" or "cuda": of the GPUs, the one of this local rank. Throws Error
// when there is no such device.
at::Device parse_device(const std::string& name, int64_t local_rank = 0);

struct ComputeSettings {
  at::Device device = at::kCPU;
  int64_t threads = 0;  // 0 = all cores, divided among the local ranks
  int64_t local_ranks = 1;
  bool tf32 = false;           // CUDA
  bool deterministic = false;  // CUDA
};
// Sets them for the process. On CPUs f32 products take oneDNN, which is faster than MKL and no less exact,
// unless AMX would round them to bf16.
void apply(const ComputeSettings& settings);

// The processor's or GPU's name: bits are the same only on the same one.
std::string machine_name(at::Device device);

int64_t resident_bytes();                 // host memory in use
int64_t peak_resident_bytes();            // its highest
int64_t device_bytes(at::Device device);  // allocated on the GPU; 0 on a CPU
int64_t peak_device_bytes(at::Device device);

// FLOP/s of the best of a few square matrix products; a tenth of a second.
double measure_peak_flops(at::Device device, at::ScalarType dtype);

}  // namespace kiln
