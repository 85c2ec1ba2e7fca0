#include "parallel/machine.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/error.h"

namespace kiln {

namespace {

// The value of the first line `key ... : value` of a text file such as those in /proc.
std::string find_value(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string gpu_name() {
  std::error_code error;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error))
    return find_value((gpu.path() / "information").string(), "Model");
  return "GPU";
}

bool has_amx() { return find_value("/proc/cpuinfo", "flags").find("amx_tile") != std::string::npos; }

int64_t status_bytes(const std::string& key) {
  const std::string value = find_value("/proc/self/status", key);  // "123456 kB"
  return value.empty() ? 0 : std::stoll(value) * 1024;
}

at::CachingAllocator::Stat allocated(at::Device device) {
  return at::accelerator::getDeviceStats(device.index())
      .allocated_bytes[static_cast<size_t>(at::CachingAllocator::StatType::AGGREGATE)];
}

}  // namespace

at::Device parse_device(const std::string& name, int64_t local_rank) {
  if (name != "auto" && name != "cpu" && name != "cuda")
    fail("device", "expected auto, cpu or cuda, got '{}'", name);
  if (name == "cpu") return at::kCPU;
  if (at::hasCUDA()) {
    const int64_t num_gpus = at::accelerator::deviceCount();
    if (local_rank >= num_gpus)
      fail("device", "expected a GPU for local rank {}, found {}: start as many ranks as GPUs", local_rank,
           num_gpus);
    return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
  }
  if (name == "cuda")
    fail("device",
         "expected a CUDA GPU, found none this build can use: run scripts/setup --cuda, or use --device cpu");
  return at::kCPU;
}

void apply(const ComputeSettings& settings) {
  const int64_t cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t share = std::max<int64_t>(1, cores / settings.local_ranks);
  at::set_num_threads(static_cast<int>(settings.threads > 0 ? settings.threads : share));
  if (settings.device.is_cuda()) at::accelerator::setDeviceIndex(settings.device.index());
  at::Context& context = at::globalContext();
  if (settings.device.is_cuda())
    context.setFloat32MatmulPrecision(settings.tf32 ? "high" : "highest");
  else if (!has_amx())
    context.setFloat32MatmulPrecision("medium");
  if (settings.deterministic) {
    context.setDeterministicCuDNN(true);
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // cuBLAS asks for it
  }
}

std::string machine_name(at::Device device) {
  if (device.is_cuda()) return gpu_name();
  const std::string model = find_value("/proc/cpuinfo", "model name");
  return fmt::format("{}, {}", model.empty() ? "CPU" : model, at::get_cpu_capability());
}

int64_t resident_bytes() { return status_bytes("VmRSS"); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM"); }
int64_t device_bytes(at::Device device) { return device.is_cuda() ? allocated(device).current : 0; }
int64_t peak_device_bytes(at::Device device) { return device.is_cuda() ? allocated(device).peak : 0; }

double measure_peak_flops(at::Device device, at::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  if (device.is_cpu() && dtype == at::kHalf) dtype = at::kFloat;  // fp16 is storage there
  at::NoGradGuard no_grad;
  const int64_t size = device.is_cuda() ? 8192 : 2048;
  const at::Tensor a = at::ones({size, size}, at::TensorOptions().device(device).dtype(dtype));
  const at::Tensor b = at::ones_like(a);
  at::Tensor product = at::empty_like(a);
  double best_seconds = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 5; ++repeat) {
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    const auto begin = Clock::now();
    at::mm_out(product, a, b);
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  const double n = static_cast<double>(size);
  return 2 * n * n * n / best_seconds;
}

}  // namespace kiln
