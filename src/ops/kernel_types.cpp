#include "ops/kernel_types.h"

#include "core/dry_run.h"
#include "core/tensors.h"
#include "ops/cuda/launch.h"

namespace kiln::ops {

bool is_kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

bool has_kernel(const at::Tensor& tensor) {
  const bool on_device =
      tensor.is_cpu() || tensor.is_meta() || (tensor.is_cuda() && cuda::kernels_compiled());
  return on_device && is_kernel_dtype(tensor.scalar_type());
}

namespace {

bool is_cpu_or_dry_run(at::Device device) {
  return device.is_cpu() || (device.is_meta() && dry_run_device() == DryRunDevice::kCpu);
}

}  // namespace

bool computes_on_cpu(const at::Tensor& tensor) { return is_cpu_or_dry_run(tensor.device()); }

bool has_cpu_kernel(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_meta()) && !computes_on_cuda(tensor) &&
         is_kernel_dtype(tensor.scalar_type());
}

bool computes_on_cuda(const at::Tensor& tensor) {
  return tensor.is_cuda() || (tensor.is_meta() && dry_run_device() == DryRunDevice::kCuda);
}

at::ScalarType product_dtype(at::Device device, at::ScalarType dtype) {
  return is_cpu_or_dry_run(device) ? cpu_product_dtype(dtype) : dtype;
}

}  // namespace kiln::ops
