#include "ops/kernels.h"

#include "core/aten.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"
#include "ops/planned/planned.h"

namespace kiln::ops {

bool is_kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

bool has_kernel(const at::Tensor& tensor) {
  return is_kernel_dtype(tensor.scalar_type()) && (!tensor.is_cuda() || cuda::kernels_compiled());
}

bool computes_on_cpu(const at::Tensor& tensor) { return computing_device(tensor.device()) == at::kCPU; }
bool computes_on_cuda(const at::Tensor& tensor) { return computing_device(tensor.device()) == at::kCUDA; }

at::ScalarType product_dtype(at::Device device, at::ScalarType dtype) {
  return computing_device(device) == at::kCPU ? cpu_product_dtype(dtype) : dtype;
}

namespace {

at::Tensor copied_to(const at::Tensor& host_values, at::Device device) { return host_values.to(device); }

constexpr Kernel<decltype(copied_to)> kOnDevice{
    .cpu = copied_to, .cuda = copied_to, .planned_cpu = planned::on_device_of_cpu, .planned_cuda = copied_to};

}  // namespace

at::Tensor on_device(const at::Tensor& host_values, at::Device device) {
  return kOnDevice.on(device)(host_values, device);
}

}  // namespace kiln::ops
