#include "parallel/nvml.h"

#include <dlfcn.h>

#include <string>

namespace kiln {

namespace {

// The part of NVML's C interface (nvml.h, API version 2) that is used. Every function returns 0 for success.
using Device = void*;
struct Utilization {
  unsigned gpu, memory;  // percent
};
struct Memory {
  unsigned long long total, free, used;  // bytes
};

// Returns the bus address ("0000:3B:00.0") of CUDA's device `index`, since NVML may number devices
// differently. Empty without a CUDA runtime in this process, or without a GPU.
std::string pci_bus_id(int index) {
  using GetPciBusId = int (*)(char*, int, int);
  const auto get = reinterpret_cast<GetPciBusId>(::dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId"));
  char id[32] = "";
  return get != nullptr && get(id, sizeof(id), index) == 0 ? id : "";
}

}  // namespace

struct Nvml::Library {
  void* handle = nullptr;
  Device device = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_index)(unsigned, Device*) = nullptr;
  int (*by_pci_bus_id)(const char*, Device*) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*power)(Device, unsigned*) = nullptr;  // milliwatts
  int (*memory)(Device, Memory*) = nullptr;
  bool initialized = false;

  ~Library() {
    if (initialized) shutdown();
    if (handle) ::dlclose(handle);
  }
  template <class Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    return function != nullptr;
  }
  bool load() {
    handle = ::dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
    return handle && find(init, "nvmlInit_v2") && find(shutdown, "nvmlShutdown") &&
           find(by_index, "nvmlDeviceGetHandleByIndex_v2") &&
           find(by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2") &&
           find(utilization, "nvmlDeviceGetUtilizationRates") && find(power, "nvmlDeviceGetPowerUsage") &&
           find(memory, "nvmlDeviceGetMemoryInfo");
  }
  bool choose(int index) {
    if (init() != 0) return false;
    initialized = true;
    const std::string id = pci_bus_id(index);
    return (!id.empty() && by_pci_bus_id(id.c_str(), &device) == 0) ||
           by_index(static_cast<unsigned>(index), &device) == 0;
  }
};

Nvml::Nvml(std::unique_ptr<Library> library) : library_(std::move(library)) {}
Nvml::~Nvml() = default;

std::unique_ptr<Nvml> Nvml::open(int index) {
  auto library = std::make_unique<Library>();
  if (!library->load() || !library->choose(index)) return nullptr;
  return std::unique_ptr<Nvml>(new Nvml(std::move(library)));
}

GpuReading Nvml::read() const {
  GpuReading reading;
  const Library& nvml = *library_;
  if (Utilization share; nvml.utilization(nvml.device, &share) == 0) reading.utilisation = share.gpu / 100.0;
  if (unsigned milliwatts; nvml.power(nvml.device, &milliwatts) == 0) reading.watts = milliwatts / 1000.0;
  if (Memory memory; nvml.memory(nvml.device, &memory) == 0) {
    reading.memory_bytes = static_cast<int64_t>(memory.used);
    reading.memory_total_bytes = static_cast<int64_t>(memory.total);
  }
  return reading;
}

}  // namespace kiln
