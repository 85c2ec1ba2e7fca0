#include <ATen/ATen.h>

#include "ops/ops.h"

namespace kiln::ops {
namespace reference {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype) {
  // fp16 on a CPU is storage: ATen multiplies it a hundred times slower than f32.
  const bool upcast = compute_dtype == at::kHalf && x.device().is_cpu();
  const at::ScalarType dtype = upcast ? at::kFloat : compute_dtype;
  at::Tensor y = at::matmul(x.to(compute_dtype).to(dtype), weight.to(compute_dtype).to(dtype).t());
  if (bias) y = y + bias->to(compute_dtype).to(dtype);
  return y.to(compute_dtype);
}

}  // namespace reference

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype) {
  return reference::linear(x, weight, bias, compute_dtype);
}

}  // namespace kiln::ops
