#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "core/aten.h"
#include "core/error.h"
#include "evaluate/metrics.h"

namespace kiln {
namespace {

// Returns the bound below which an eigenvalue is only rounding. Its root would be much larger than rounding.
double rounding_of(const at::Tensor& eigenvalues) {
  return std::numeric_limits<double>::epsilon() * static_cast<double>(eigenvalues.numel()) *
         std::max(eigenvalues.abs().max().item<double>(), std::numeric_limits<double>::min());
}

// Returns S (D, rank) with sigma = S S^T.
at::Tensor factor_of(const at::Tensor& sigma) {
  const auto [values, vectors] = at::linalg_eigh((sigma + sigma.t()) / 2);  // ascending
  const int64_t rank = (values > rounding_of(values)).sum().item<int64_t>();
  const int64_t first = values.numel() - rank;
  return vectors.narrow(1, first, rank) * values.narrow(0, first, rank).sqrt();
}

}  // namespace

double frechet_distance(const GaussianStatistics& a, const GaussianStatistics& b) {
  if (!a.mu.sizes().equals(b.mu.sizes()))
    fail("evaluate", "expected features of one width, got {} and {}", a.mu.numel(), b.mu.numel());
  const at::NoGradGuard no_grad;
  const at::Tensor factor = factor_of(a.sigma);
  double trace_of_root = 0;
  if (factor.size(1) > 0) {
    const at::Tensor product = factor.t().mm(b.sigma.mm(factor));
    const at::Tensor values = at::linalg_eigvalsh((product + product.t()) / 2);
    const double rounding = rounding_of(values);
    trace_of_root = at::where(values > rounding, values, at::zeros_like(values)).sqrt().sum().item<double>();
  }
  const at::Tensor difference = a.mu - b.mu;
  return difference.dot(difference).item<double>() + a.sigma.trace().item<double>() +
         b.sigma.trace().item<double>() - 2 * trace_of_root;
}

}  // namespace kiln
