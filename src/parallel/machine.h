// What the machine is, what it holds and how fast it multiplies.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "core/choices.h"

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

// The CUDA device of a local rank among the GPUs that this process sees: the only one where the launcher gave
// each rank one of its own (CUDA_VISIBLE_DEVICES). Throws Error when there are fewer GPUs than ranks.
int64_t gpu_of_rank(int64_t local_rank, int64_t num_gpus);

// How a run computes.
struct ComputeOptions {
  DeviceChoice device = DeviceChoice::kAuto;
  // As chosen. kFloat8_e4m3fn (fp8) is of large products alone.
  at::ScalarType dtype = at::kFloat;
  at::ScalarType master_dtype = at::kFloat;  // of master weights: f32, or bf16 rounded stochastically
  bool emulate_fp8 = false;                  // fp8's rounding where the hardware lacks fp8
  bool tf32 = false;                         // CUDA: f32 products in TF32
  bool cuda_graph = false;                   // CUDA: a micro-batch's forward and backward as one graph
  bool deterministic = false;                // CUDA: only kernels that give the same bits each time
  bool accumulate_f32 = false;               // f32 gradients even where nothing is accumulated
  int64_t threads = 0;                       // 0: all cores

  bool is_fp8() const { return dtype == at::kFloat8_e4m3fn; }
  // What weights and activations are held in, and products run in where fp8 does not serve.
  at::ScalarType held_dtype() const { return is_fp8() ? at::kBFloat16 : dtype; }
  // What large products run in.
  at::ScalarType product_dtype() const { return emulate_fp8 ? held_dtype() : dtype; }
};

struct ComputeSettings {
  at::Device device = at::kCPU;
  int64_t threads = 0;         // 0 = cpu_share
  int64_t cpu_share = 0;       // of several ranks (cpu_share.h); 0 = all processors that this process may use
  bool tf32 = false;           // CUDA
  bool deterministic = false;  // CUDA
};
// Sets them for the process. On CPUs f32 products take oneDNN, which is faster than MKL and no less exact,
// unless AMX would round them to bf16.
void apply(const ComputeSettings& settings);
// On CUDA devices, f32 products and convolutions in TF32, or not.
void allow_tf32(bool allowed);
// Says on stderr that --tf32 does nothing where `device` has no such products. `who`: "kiln sample".
void note_tf32(const char* who, bool tf32, at::Device device);

// The processor's or GPU's name: bits are the same only on the same one.
std::string machine_name(at::Device device);

int64_t resident_bytes();                 // host memory in use
int64_t peak_resident_bytes();            // its highest
int64_t device_bytes(at::Device device);  // of tensors on the GPU; 0 on a CPU
int64_t peak_device_bytes(at::Device device);

// FLOP/s of the best of a few square matrix products; a tenth of a second. Their memory, some 600 MB on a
// GPU, is given back.
double measure_peak_flops(at::Device device, at::ScalarType dtype);

}  // namespace kiln
