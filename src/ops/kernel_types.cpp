#include "ops/kernel_types.h"

namespace kiln::ops {

bool has_kernel(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const bool element = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return element && (tensor.is_cpu() || tensor.is_meta());
}

}  // namespace kiln::ops
