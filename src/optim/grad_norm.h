// The global gradient norm and clipping by it.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace kiln {

// Returns the sum of squares over all flat gradients as a 0-d f64 tensor on their device, without host
// synchronisation.
at::Tensor global_sum_of_squares(const std::vector<at::Tensor>& flat_grads);

// Returns what gradients are multiplied by: min(1, max_grad_norm / (norm + 1e-6)), as in
// torch.nn.utils.clip_grad_norm_; 1 when max_grad_norm is 0 (off).
double clip_coefficient(double grad_norm, double max_grad_norm);

}  // namespace kiln
