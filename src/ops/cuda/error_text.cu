#include <cuda_runtime_api.h>

#include <cstdio>

#include "ops/cuda/kernels.h"

namespace {

struct Capability {
  int major = 0, minor = 0;
  bool is_known() const { return major > 0; }
};

Capability capability_of_current_device() {
  int device = 0;
  Capability capability;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
    return {};
  return capability;
}

}  // namespace

void kiln_cuda_error_text(int error, char* text, size_t size) {
  const Capability gpu =
      error == cudaErrorNoKernelImageForDevice ? capability_of_current_device() : Capability{};
  if (!gpu.is_known()) {
    std::snprintf(text, size, "%s", cudaGetErrorString(static_cast<cudaError_t>(error)));
    return;
  }
  char compiled[64] = "";
  size_t length = 0;
  for (const int architecture : {__CUDA_ARCH_LIST__})  // nvcc's: 750, 800, ...
    if (length < sizeof compiled)
      length += static_cast<size_t>(std::snprintf(compiled + length, sizeof compiled - length, " %d.%d",
                                                  architecture / 100, architecture / 10 % 10));
  std::snprintf(text, size,
                "this GPU has compute capability %d.%d, the kernels are compiled for%s: configure with "
                "-DKILN_CUDA_ARCHITECTURES=%d%d",
                gpu.major, gpu.minor, compiled, gpu.major, gpu.minor);
}

int kiln_cuda_capability(void) {
  const Capability gpu = capability_of_current_device();
  return gpu.major * 10 + gpu.minor;
}
