#include "parallel/machine.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>

#include "core/aten.h"
#include "core/cpu_level.h"
#include "core/error.h"
#include "core/memory_limits.h"
#include "core/tensors.h"
#include "core/units.h"
#include "parallel/cpu_share.h"

namespace kiln {

namespace {

// Returns the value of the first line `key ... : value` of a text file such as those in /proc.
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

// Asks the driver through its C interface (cuda.h). It exists wherever CUDA runs and numbers the GPUs as CUDA
// does.
std::string gpu_name(at::Device device) {
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!driver) return "GPU";
  const auto get = reinterpret_cast<int (*)(int*, int)>(::dlsym(driver, "cuDeviceGet"));
  const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(::dlsym(driver, "cuDeviceGetName"));
  char name[256] = "";
  int handle = 0;
  const bool found =
      get && get_name && get(&handle, device.index()) == 0 && get_name(name, sizeof name, handle) == 0;
  ::dlclose(driver);
  return found ? name : "GPU";
}

int64_t status_bytes(const std::string& key) {
  const std::string value = find_value("/proc/self/status", key);  // "123456 kB"
  return value.empty() ? 0 : std::stoll(value) * 1024;
}

// Returns the bytes that tensors requested, which is what plans count. The allocator rounds them up.
at::CachingAllocator::Stat requested(at::Device device) {
  return at::accelerator::getDeviceStats(device.index())
      .requested_bytes[static_cast<size_t>(at::CachingAllocator::StatType::AGGREGATE)];
}

// Returns the shortest time of a few runs of `work` on the device.
template <class Work>
double shortest_seconds(at::Device device, const Work& work) {
  using Clock = std::chrono::steady_clock;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 5; ++repeat) {
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    const auto begin = Clock::now();
    work();
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best_seconds;
}

// Returns the FLOP/s of (m, k) times (k, n).
double flops_of_product(int64_t m, int64_t n, int64_t k, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  // Random bits, as in training. Equal bits take less power and run at a higher clock.
  const at::Tensor a = at::randn({m, k}, options), b = at::randn({k, n}, options);
  at::Tensor product = at::empty({m, n}, options);
  return 2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) /
         shortest_seconds(options.device(), [&] { at::mm_out(product, a, b); });
}

// Returns the bytes/s of a copy or a sum in place, whichever is faster: on a CPU a copy also reads the memory
// that it overwrites.
double bytes_of_memory_per_s(at::Device device) {
  const at::NoGradGuard no_grad;
  const int64_t bytes = device.is_cuda() ? int64_t{1} << 30 : int64_t{1} << 27;
  const at::Tensor from =
      at::zeros({bytes / static_cast<int64_t>(sizeof(float))}, at::TensorOptions().device(device));
  at::Tensor to = at::zeros_like(from);
  const double copy = 2 / shortest_seconds(device, [&] { to.copy_(from); }),
               sum = 3 / shortest_seconds(device, [&] { to.add_(from); });
  return static_cast<double>(bytes) * std::max(copy, sum);
}

void init_cuda(const ComputeSettings& settings) {
  // Creates the caching allocator and its statistics now instead of with the first tensor.
  at::globalContext().lazyInitDevice(at::kCUDA);
  at::accelerator::setDeviceIndex(settings.device.index());
  allow_tf32(settings.tf32);
}

// By default torch lets cuBLAS add up the parts of a bf16 or fp16 product in that dtype when it divides the
// long side.
void accumulate_in_f32() {
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  at::globalContext().setAllowFP16ReductionCuBLAS(false);
}

void be_deterministic() {
  at::Context& context = at::globalContext();
  context.setDeterministicCuDNN(true);
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Every element is written before it is read: filling new memory would only cost time.
  context.setDeterministicFillUninitializedMemory(false);
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // cuBLAS requires it
}

}  // namespace

int64_t gpu_of_rank(int64_t local_rank, int64_t num_gpus) {
  if (local_rank < num_gpus) return local_rank;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // set by launchers that give each rank one GPU
  if (num_gpus == 1 && visible && *visible) return 0;
  fail("device", "expected a GPU for local rank {}, found {}: start as many ranks as GPUs", local_rank,
       num_gpus);
}

at::Device parse_device(const std::string& name, int64_t local_rank) {
  const std::optional<DeviceChoice> choice = find_choice<DeviceChoice>(name);
  if (!choice) fail("device", "expected auto, cpu or cuda, got '{}'", name);
  return choose_device(*choice, local_rank);
}

at::Device choose_device(DeviceChoice choice, int64_t local_rank) {
  if (choice == DeviceChoice::kCpu) return at::kCPU;
  if (at::hasCUDA()) {
    const int64_t index = gpu_of_rank(local_rank, at::accelerator::deviceCount());
    return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
  }
  if (choice == DeviceChoice::kCuda)
    fail("device",
         "expected a CUDA GPU, found none this build can use: run scripts/setup --cuda, or use --device cpu");
  return at::kCPU;
}

void apply(const ComputeSettings& settings) {
  constexpr int64_t kMostThreads = 1024;  // with more, the thread pool may end the process
  if (settings.threads < 0 || settings.threads > kMostThreads)
    fail("device", "--threads expects 0 (all processors) to {}, got {}", kMostThreads, settings.threads);
  at::set_num_threads(static_cast<int>(settings.threads > 0     ? settings.threads
                                       : settings.cpu_share > 0 ? settings.cpu_share
                                                                : num_own_cpus()));
  if (settings.device.is_cuda())
    init_cuda(settings);
  else if (cpu_level() < CpuLevel::kAmx)
    at::globalContext().setFloat32MatmulPrecision("medium");
  accumulate_in_f32();
  if (settings.deterministic) be_deterministic();
}

void allow_tf32(bool allowed) {
  at::Context& context = at::globalContext();
  context.setFloat32MatmulPrecision(allowed ? "high" : "highest");
  context.setAllowTF32CuDNN(allowed);
}

void note_tf32(const char* who, bool tf32, at::Device device) {
  if (tf32 && !device.is_cuda()) fmt::print(stderr, "note: {}: --tf32 has no effect on a CPU\n", who);
}

std::string machine_name(at::Device device) {
  if (device.is_cuda()) return gpu_name(device);
  const std::string model = find_value("/proc/cpuinfo", "model name");
  return fmt::format("{}, {}", model.empty() ? "CPU" : model, name_of(cpu_level()));
}

int64_t resident_bytes() { return status_bytes("VmRSS"); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM"); }
int64_t device_bytes(at::Device device) { return device.is_cuda() ? requested(device).current : 0; }
int64_t peak_device_bytes(at::Device device) { return device.is_cuda() ? requested(device).peak : 0; }

double measure_peak_flops(at::Device device, at::ScalarType dtype) {
  if (device.is_cpu()) dtype = cpu_product_dtype(dtype);
  const auto flops_of = [options = at::TensorOptions().device(device).dtype(dtype)](int64_t size) {
    return flops_of_product(size, size, size, options);
  };
  // Few processors reach their peak in products that would be too small for many: 10 ms of 1024 are 0.2
  // TFLOP/s.
  constexpr double kFewProcessors = 2e11;
  double flops = flops_of(device.is_cuda() ? 8192 : 1024);
  if (device.is_cpu() && flops > kFewProcessors) flops = flops_of(2048);
  if (device.is_cuda()) at::accelerator::emptyCache();
  return flops;
}

MachineRates measure_rates(at::Device device, at::ScalarType dtype) {
  MachineRates rates{.flops_per_s = measure_peak_flops(device, dtype)};
  if (device.is_cpu()) dtype = cpu_product_dtype(dtype);
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(dtype);
  const int64_t rows = device.is_cuda() ? 8 : 1, width = device.is_cuda() ? 4 : 1;
  constexpr int64_t kShapes[][3] = {{2048, 1152, 384}, {2048, 384, 1536}, {1024, 768, 3072}};
  for (const auto& [m, n, k] : kShapes)
    rates.flops_per_s =
        std::max(rates.flops_per_s, flops_of_product(rows * m, width * n, width * k, options));
  rates.bytes_per_s = bytes_of_memory_per_s(device);
  if (device.is_cuda()) at::accelerator::emptyCache();
  return rates;
}

int64_t usable_bytes(at::Device device, int64_t num_processes) {
  const int64_t free = device.is_cpu()
                           ? host_memory().available_bytes / num_processes
                           : static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
  return free / 5 * 4;  // a fifth stays free for others
}

int64_t bytes_left_of(const char* option, const std::string& limit, at::Device device) {
  const int64_t bytes = byte_size(limit);
  if (bytes == 0) fail("memory", "--{} expects a size such as 3G, 2.5GiB or 800M, got '{}'", option, limit);
  const int64_t taken = device.is_cpu() ? resident_bytes() : device_bytes(device);
  if (taken >= bytes)
    fail("memory", "--{} {} is less than the {:.2f} GiB that this process takes already: give more", option,
         limit, gib(taken));
  return bytes - taken;
}

}  // namespace kiln
