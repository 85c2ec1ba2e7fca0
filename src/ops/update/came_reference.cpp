// CAME's passes, composed of ATen's operations.
#include "core/aten.h"
#include "ops/ops.h"
#include "ops/update/came.h"

namespace kiln::ops::reference {
namespace {

at::Tensor gradient(const ScaledGradients& grads) {
  const at::Tensor wide = grads.values.to(at::kFloat);
  return grads.scale == 1 ? wide : wide * grads.scale;
}

// Returns `values` times the roots.
at::Tensor scaled(const RowsAndColumns& roots, const at::Tensor& values) {
  return (roots.rows.unsqueeze(-1) * roots.columns.unsqueeze(-2)).mul_(values);
}

void add_sums(const at::Tensor& values, const RowsAndColumns& sums) {
  sums.columns.add_(values.sum(-2));
  sums.rows.add_(values.sum(-1));
}

// average = beta average + (1 - beta) value
void move_average(const at::Tensor& average, const at::Tensor& value, double beta) {
  average.mul_(beta).add_(value, 1 - beta);
}

}  // namespace

void came_add_squares(const ScaledGradients& grads, double eps, const RowsAndColumns& sums) {
  add_sums(gradient(grads).square().add_(eps), sums);
}

at::Tensor came_sum_of_squares(const ScaledGradients& grads, const RowsAndColumns& roots) {
  return ops::sum_of_squares(scaled(roots, gradient(grads)).view(-1));
}

void came_move_mean(const ScaledGradients& grads, const RowsAndColumns& roots, const at::Tensor& divisor,
                    const at::Tensor& mean, double beta, double eps, const RowsAndColumns& distances) {
  at::Tensor update = scaled(roots, gradient(grads)).div_(divisor);
  move_average(mean, update, beta);
  add_sums(update.sub_(mean).square_().add_(eps), distances);
}

void came_move_weights(const at::Tensor& weights, const at::Tensor& mean, const RowsAndColumns& roots,
                       double lr, double decay, const at::Tensor& compute) {
  if (decay != 0) weights.add_(weights, -decay);
  weights.sub_(scaled(roots, mean).mul_(lr));
  if (compute.defined()) compute.copy_(weights);
}

at::Tensor came_square_elements(const ScaledGradients& grads, const at::Tensor& squares, double beta,
                                double eps) {
  const at::Tensor values = gradient(grads);
  move_average(squares, values.square().add_(eps), beta);
  return ops::sum_of_squares(squares.rsqrt().mul_(values));
}

void came_move_elements(const ScaledGradients& grads, const at::Tensor& divisor, const CameElements& e) {
  at::Tensor update = e.squares.rsqrt().mul_(gradient(grads)).div_(divisor);
  move_average(e.mean, update, e.beta_mean);
  if (e.decay != 0) e.weights.add_(e.weights, -e.decay);
  if (e.distances.defined()) {
    move_average(e.distances, update.sub_(e.mean).square_().add_(e.eps_distance), e.beta_distance);
    e.weights.sub_(e.distances.rsqrt().mul_(e.mean).mul_(e.lr));
  } else {
    e.weights.sub_(e.mean * e.lr);
  }
  if (e.compute.defined()) e.compute.copy_(e.weights);
}

}  // namespace kiln::ops::reference
