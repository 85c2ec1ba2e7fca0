#include <ATen/Parallel.h>

#include <limits>
#include <vector>

#include "core/aten.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

// Elements per partial sum. It is fixed, so that the thread count does not matter.
constexpr int64_t kBlock = 1 << 15;

// Sums pairwise, by position.
double tree_sum(std::vector<double>& values) {
  for (size_t stride = 1; stride < values.size(); stride *= 2) {
    for (size_t i = 0; i + stride < values.size(); i += 2 * stride) {
      values[i] += values[i + stride];
    }
  }
  return values.empty() ? 0 : values[0];
}

void sum_on_cpu(const at::Tensor& flat, const at::Tensor& sum) {
  const Dtype dtype = from_scalar_type(flat.scalar_type());
  const size_t block_bytes = kBlock * dtype_size(dtype);
  const char* from = static_cast<const char*>(flat.const_data_ptr());
  std::vector<double> blocks(at::divup(flat.numel(), kBlock));
  parallel_pieces(blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      blocks[i] =
          cpu::sum_of_squares(dtype, from + i * block_bytes, std::min(kBlock, flat.numel() - i * kBlock));
    }
  });
  *sum.mutable_data_ptr<double>() = tree_sum(blocks);
}

constexpr Kernel<decltype(sum_on_cpu)> kSum{.cpu = sum_on_cpu, .cuda = cuda::sum_of_squares};
constexpr Kernel<decltype(cuda::step_scale)> kStepScale{
    .cuda = cuda::step_scale, .planned_cpu = nothing};  // what a CPU composes here is not planned

}  // namespace

at::Tensor sum_of_squares(const at::Tensor& flat_in) {
  const OpMark mark("kiln::sum_of_squares", flat_in);
  const at::Tensor flat = flat_in.detach().contiguous();
  const auto kernel = kSum.serving(flat);
  if (!kernel) return at::linalg_vector_norm(flat, 2, {}, false, at::kDouble).square();
  at::Tensor sum = at::empty({}, flat.options().dtype(at::kDouble));
  kernel(flat, sum);
  return sum;
}

at::Tensor step_scale(const at::Tensor& sum_of_squares, const at::Tensor& losses, double max_grad_norm,
                      double loss_scale) {
  const OpMark mark("kiln::step_scale", sum_of_squares, losses);
  const auto kernel = kStepScale.on(sum_of_squares);
  if (kernel && (!sum_of_squares.is_cuda() || cuda::kernels_compiled())) {
    at::Tensor scale = at::empty({}, sum_of_squares.options().dtype(at::kFloat));
    kernel(sum_of_squares, losses.contiguous(), max_grad_norm, loss_scale, scale);
    return scale;
  }
  const at::Tensor norm = sum_of_squares.sqrt() / loss_scale;
  const at::Tensor clip = max_grad_norm > 0 ? at::full_like(norm, max_grad_norm).div(norm + 1e-6).clamp_max(1)
                                            : at::ones_like(norm);
  const at::Tensor finite = at::isfinite(norm).logical_and(at::isfinite(losses).all());
  const at::Tensor nothing = at::full_like(norm, std::numeric_limits<double>::quiet_NaN());
  return at::where(finite, clip / loss_scale, nothing).to(at::kFloat);
}

}  // namespace kiln::ops
