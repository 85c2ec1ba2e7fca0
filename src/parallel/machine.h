// What the machine is, how fast it multiplies, and how much memory it holds and still has.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "core/choices.h"
#include "parallel/untried_gpu.h"

namespace kiln {

enum class DeviceChoice {
  kAuto,  // CUDA where there is a GPU
  kCpu,
  kCuda,
};
template <>
struct Choices<DeviceChoice> {
  static constexpr std::pair<DeviceChoice, const char*> kAll[] = {
      {DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}};
};
// Chooses the GPU of this local rank. Throws Error when there is no such device.
at::Device choose_device(DeviceChoice choice, int64_t local_rank = 0);
// The same by name.
at::Device parse_device(const std::string& name, int64_t local_rank = 0);

// Returns the CUDA device of a local rank among the GPUs that this process sees. If the launcher gave each
// rank a GPU of its own (CUDA_VISIBLE_DEVICES), that is the only one. Throws Error when there are fewer GPUs
// than ranks.
int64_t gpu_of_rank(int64_t local_rank, int64_t num_gpus);

// How a run computes.
struct ComputeOptions {
  DeviceChoice device = DeviceChoice::kAuto;
  // As chosen. kFloat8_e4m3fn (fp8) only applies to large products.
  at::ScalarType dtype = at::kFloat;
  at::ScalarType master_dtype = at::kFloat;  // of master weights: f32, or bf16 with stochastic rounding
  bool emulate_fp8 = false;                  // rounds as fp8 where the hardware lacks it
  bool tf32 = false;                         // CUDA: f32 products in TF32
  bool cuda_graph = false;                   // CUDA: a micro-batch's forward and backward as one graph
  UntriedGpu untried_gpu{};                  // CUDA: faster ways that have not run on a GPU yet
  bool deterministic = false;                // CUDA: only kernels that give the same bits each time
  bool accumulate_f32 = false;               // f32 gradients even where nothing is accumulated
  int64_t threads = 0;                       // 0: all cores

  // The update runs beside the next forward if its state is on the device. A recorded graph would not wait.
  bool updates_beside() const { return untried_gpu.has(Untried::kUpdate) && !cuda_graph; }
  bool is_fp8() const { return dtype == at::kFloat8_e4m3fn; }
  // The dtype of weights, activations and products without fp8.
  at::ScalarType held_dtype() const { return is_fp8() ? at::kBFloat16 : dtype; }
  // The dtype of large products.
  at::ScalarType product_dtype() const { return emulate_fp8 ? held_dtype() : dtype; }
};

struct ComputeSettings {
  at::Device device = at::kCPU;
  int64_t threads = 0;         // 0 = cpu_share
  int64_t cpu_share = 0;       // this rank's processors (cpu_share.h); 0 = all that this process may use
  bool tf32 = false;           // CUDA
  bool deterministic = false;  // CUDA
};
// Applies the settings to the process. On CPUs f32 products then use oneDNN, which is faster than MKL and no
// less exact, unless AMX would round them to bf16.
void apply(const ComputeSettings& settings);
// Allows or forbids TF32 for f32 products and convolutions on CUDA devices.
void allow_tf32(bool allowed);
// Says on stderr that --tf32 has no effect if `device` is no GPU. `who`: "kiln sample".
void note_tf32(const char* who, bool tf32, at::Device device);

// Returns the name of the processor or GPU. Results are only bitwise equal on the same one.
std::string machine_name(at::Device device);

int64_t resident_bytes();                 // host memory in use
int64_t peak_resident_bytes();            // its peak
int64_t device_bytes(at::Device device);  // of tensors on the GPU; 0 on a CPU
int64_t peak_device_bytes(at::Device device);

// Measures FLOP/s: the best of a few square matrix products. Takes a tenth of a second. Their memory, some
// 600 MB on a GPU, is freed.
double measure_peak_flops(at::Device device, at::ScalarType dtype);

// The best that a device reaches.
struct MachineRates {
  double flops_per_s = 0;  // of products in any shape
  double bytes_per_s = 0;  // of memory, read and written
};
// Measures them: products of a few shapes as models have them, and passes over memory that no cache holds.
// Takes half a second; their memory, some 2 GB on a GPU and 300 MB on a CPU, is freed.
MachineRates measure_rates(at::Device device, at::ScalarType dtype);

// Returns how much of the free memory a component may use. A CPU's memory is divided among `num_processes`
// processes of this machine. Returns 0 if the system does not say how much is free.
int64_t usable_bytes(at::Device device, int64_t num_processes);

// Returns what is left of a limit such as "3G" on the process's tensors. On a CPU the limit is on resident
// memory, which holds more than tensors. Throws Error "--`option` ..." if nothing is left or `limit` is no
// size.
int64_t bytes_left_of(const char* option, const std::string& limit, at::Device device);

}  // namespace kiln
