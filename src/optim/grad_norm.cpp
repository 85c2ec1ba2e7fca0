#include "optim/grad_norm.h"

#include <algorithm>

#include "core/aten.h"
#include "ops/ops.h"

namespace kiln {

at::Tensor global_sum_of_squares(const std::vector<at::Tensor>& flat_grads) {
  std::vector<at::Tensor> sums;
  sums.reserve(flat_grads.size());
  for (const at::Tensor& grads : flat_grads) sums.push_back(ops::sum_of_squares(grads));
  return at::stack(sums).sum();
}

double clip_coefficient(double grad_norm, double max_grad_norm) {
  if (max_grad_norm <= 0) return 1;
  return std::min(1.0, max_grad_norm / (grad_norm + 1e-6));
}

}  // namespace kiln
