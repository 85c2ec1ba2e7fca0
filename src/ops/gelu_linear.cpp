#include <ATen/ATen.h>

#include "ops/ops.h"

namespace kiln::ops {
namespace reference {

at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            at::ScalarType compute_dtype) {
  return linear(at::gelu(h, "tanh"), weight, bias, compute_dtype);
}

}  // namespace reference

at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            at::ScalarType compute_dtype) {
  return reference::gelu_tanh_linear(h, weight, bias, compute_dtype);
}

}  // namespace kiln::ops
