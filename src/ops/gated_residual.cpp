#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/modulation.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void gated_on_cpu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y, const at::Tensor& out) {
  const GatedResidualArgs args = gated_residual_args(gate, y);
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  const Dtype x_dtype = from_scalar_type(x.scalar_type());
  parallel_pieces(x.size(0) * x.size(1), rows_of_piece(x.size(2)), [&](int64_t begin, int64_t end) {
    cpu::gated_residual(args, from, to, x_dtype, begin, end);
  });
}

void gated_grad_on_cpu(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& y,
                       const at::Tensor& dy, const at::Tensor& dgate, const at::Tensor& partials) {
  const GatedResidualArgs args = gated_residual_args(gate, y);
  const int64_t num_partials = partials.size(1), rows = args.rows_per_batch, width = args.width;
  float* gate_sums = partials.mutable_data_ptr<float>();
  const void* g = grad.const_data_ptr();
  const Dtype grad_dtype = from_scalar_type(grad.scalar_type());
  void* to = dy.mutable_data_ptr();
  parallel_pieces(partials.size(0) * num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % num_partials * kRowsPerPartial;
      const int64_t row = task / num_partials * rows + first;
      cpu::gated_residual_grad(args, g, grad_dtype, to, gate_sums + task * width, row,
                               row + std::min(kRowsPerPartial, rows - first));
    }
  });
  sum_partials(partials, dgate);
}

constexpr Kernel<decltype(gated_on_cpu)> kGated{
    .cpu = gated_on_cpu,
    .cuda = [](const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y, const at::Tensor& out) {
      cuda::gated_residual(gated_residual_args(gate, y), x, out);
    }};
constexpr Kernel<decltype(gated_grad_on_cpu)> kGatedGrad{
    .cpu = gated_grad_on_cpu,
    .cuda = [](const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& y, const at::Tensor& dy,
               const at::Tensor& dgate, const at::Tensor& partials) {
      cuda::gated_residual_grad(gated_residual_args(gate, y), grad, dy, dgate, partials,
                                kRowsPerPartialOnGpu);
    }};

class GatedResidual : public torch::autograd::Function<GatedResidual> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& gate_in,
                            const at::Tensor& y_in) {
    OpMark mark("kiln::gated_residual", x_in, gate_in, y_in);
    const at::Tensor x = x_in.contiguous(), y = y_in.contiguous(), gate = unit_stride_rows(gate_in);
    at::Tensor out = at::empty_like(x);
    mark.outputs(out);
    ctx->save_for_backward({gate, y});
    kGated.on(x)(x, gate, y, out);
    return out;
  }

  // x enters by addition, so its gradient is the incoming tensor itself.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &y = saved[1];
    OpMark mark("kiln::gated_residual_backward", grads[0], gate, y);
    const at::Tensor grad = grads[0].contiguous();
    const int64_t batch = y.size(0), width = y.size(2);
    const at::Tensor dy = at::empty_like(y), dgate = at::empty({batch, width}, gate.options());
    mark.outputs(dy, dgate);
    const at::Tensor partials = partial_sums({batch}, y);
    kGatedGrad.on(y)(grad, gate, y, dy, dgate, partials);
    return {grads[0], dgate, dy};
  }
};

}  // namespace

at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y) {
  check_gated_residual("gated_residual", x, gate, y);
  const bool serves = has_kernel(x) && has_kernel(gate) && has_kernel(y) && x.numel() > 0 &&
                      (!x.is_cuda() || cuda::serves_rows(x, y.scalar_type()));
  if (!serves) return reference::gated_residual(x, gate, y);
  return GatedResidual::apply(x, gate, y);
}

namespace reference {

at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y) {
  const auto math = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return (x.to(math) + gate.to(math).unsqueeze(1) * y.to(math)).to(x.scalar_type());
}

}  // namespace reference
}  // namespace kiln::ops
