#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
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

constexpr int64_t kAdalnRows = 16;  // that are in the cache together

// The tensors of a norm with input x, and of the branch before it. Backward does not read shift, which may
// then be undefined. An undefined y means that there is no branch.
struct NormedRows {
  const at::Tensor &x, &shift, &scale, &mean, &rstd, &gate, &y;
};

AdalnArgs args_of(const NormedRows& rows, double eps = 0) {
  const auto& [x, shift, scale, mean, rstd, gate, y] = rows;
  return {.x = x.const_data_ptr(),
          .x_dtype = from_scalar_type(x.scalar_type()),
          .shift = shift.defined() ? shift.const_data_ptr() : nullptr,
          .scale = scale.const_data_ptr(),
          .modulation_dtype = from_scalar_type(scale.scalar_type()),
          .shift_stride = static_cast<size_t>(shift.defined() ? shift.stride(0) : 0),
          .scale_stride = static_cast<size_t>(scale.stride(0)),
          .rows_per_batch = static_cast<size_t>(x.size(1)),
          .width = static_cast<size_t>(x.size(2)),
          .eps = static_cast<float>(eps),
          .mean = mean.mutable_data_ptr<float>(),
          .rstd = rstd.mutable_data_ptr<float>()};
}

GatedResidualArgs branch_of(const NormedRows& rows) {
  return rows.y.defined() ? gated_residual_args(rows.gate, rows.y) : GatedResidualArgs{};
}

// The kernels read `out` and `around`, which may be undefined, and write the others.
struct NormedRowsGrads {
  const at::Tensor &out, &around, &x, &shift, &scale, &gate, &y;
};

AdalnGrads args_of(const NormedRowsGrads& grads) {
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  return {.out = grads.out.const_data_ptr(),
          .around = grads.around.defined() ? grads.around.const_data_ptr() : nullptr,
          .x = data(grads.x),
          .shift = data(grads.shift),
          .scale = data(grads.scale),
          .y = data(grads.y),
          .gate = data(grads.gate)};
}

// Normalises a few rows right after their residual sum, while that is in the cache.
void adaln_on_cpu(const NormedRows& rows, double eps, const at::Tensor& x_in, const at::Tensor& out) {
  const AdalnArgs args = args_of(rows, eps);
  const GatedResidualArgs branch = branch_of(rows);
  const void* from = x_in.const_data_ptr();
  void* sums = branch.y == nullptr ? nullptr : rows.x.mutable_data_ptr();
  void* to = out.mutable_data_ptr();
  const Dtype out_dtype = from_scalar_type(out.scalar_type());
  parallel_pieces(out.size(0) * out.size(1), rows_of_piece(out.size(2)), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kAdalnRows) {
      const int64_t last = std::min(end, first + kAdalnRows);
      if (sums != nullptr) cpu::gated_residual(branch, from, sums, args.x_dtype, first, last);
      cpu::adaln(args, to, out_dtype, first, last);
    }
  });
}

void adaln_grad_on_cpu(const NormedRows& tensors, const NormedRowsGrads& to, const at::Tensor& partials) {
  const AdalnArgs args = args_of(tensors);
  const GatedResidualArgs branch = branch_of(tensors);
  const AdalnGrads grads = args_of(to);
  const Dtype grad_dtype = from_scalar_type(to.out.scalar_type());
  const int64_t num_partials = partials.size(2), rows = args.rows_per_batch, width = args.width;
  float* sums = partials.mutable_data_ptr<float>();
  const int64_t plane = partials.stride(0);
  parallel_pieces(partials.size(1) * num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % num_partials * kRowsPerPartial;
      const int64_t row = task / num_partials * rows + first;
      const int64_t row_end = row + std::min(kRowsPerPartial, rows - first);
      float* shift_sums = sums + task * width;
      cpu::adaln_grad(args, grads.out, grad_dtype, grads.around, grads.x, shift_sums, shift_sums + plane, row,
                      row_end);
      if (branch.y != nullptr)
        cpu::gated_residual_grad(branch, grads.x, args.x_dtype, grads.y, shift_sums + 2 * plane, row,
                                 row_end);
    }
  });
  sum_partials(partials[0], to.shift);
  sum_partials(partials[1], to.scale);
  if (branch.y != nullptr) sum_partials(partials[2], to.gate);
}

constexpr Kernel<decltype(adaln_on_cpu)> kAdaln{
    .cpu = adaln_on_cpu,
    .cuda = [](const NormedRows& rows, double eps, const at::Tensor& x_in, const at::Tensor& out) {
      cuda::adaln(args_of(rows, eps), branch_of(rows), x_in, rows.x, out);
    }};
constexpr Kernel<decltype(adaln_grad_on_cpu)> kAdalnGrad{
    .cpu = adaln_grad_on_cpu,
    .cuda = [](const NormedRows& rows, const NormedRowsGrads& to, const at::Tensor& partials) {
      cuda::adaln_grad(args_of(rows), branch_of(rows), args_of(to), to.out, partials, kRowsPerPartialOnGpu);
    }};

// Normalises x, or x + gate * y. Returns the norm's input and its result; without a branch the input is x
// itself.
struct NormedResidualFunction : torch::autograd::Function<NormedResidualFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& gate_in,
                               const std::optional<at::Tensor>& y_in, const at::Tensor& shift_in,
                               const at::Tensor& scale_in, double eps, at::ScalarType out_dtype) {
    const bool has_branch = y_in.has_value();
    OpMark mark(has_branch ? "kiln::gated_residual_adaln" : "kiln::adaln_modulate", x_in, shift_in, scale_in,
                gate_in.value_or(at::Tensor()), y_in.value_or(at::Tensor()));
    const at::Tensor dense = x_in.contiguous(), x = has_branch ? at::empty_like(dense) : dense;
    const at::Tensor y = has_branch ? y_in->contiguous() : at::Tensor();
    const at::Tensor gate = has_branch ? unit_stride_rows(*gate_in) : at::Tensor();
    const at::Tensor shift = unit_stride_rows(shift_in), scale = unit_stride_rows(scale_in);
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(out_dtype));
    const at::Tensor mean = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
    const at::Tensor rstd = at::empty_like(mean);
    has_branch ? mark.outputs(x, out, mean, rstd) : mark.outputs(out, mean, rstd);
    ctx->save_for_backward({x, scale, mean, rstd, gate, y});
    ctx->set_materialize_grads(false);
    kAdaln.on(x)({x, shift, scale, mean, rstd, gate, y}, eps, dense, out);
    return {has_branch ? x : x_in, out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &scale = saved[1], &mean = saved[2], &rstd = saved[3], &gate = saved[4],
                     &y = saved[5];
    OpMark mark(y.defined() ? "kiln::gated_residual_adaln_backward" : "kiln::adaln_modulate_backward",
                grads[1], x, scale, mean, rstd, grads[0], gate, y);
    // A stream that only the norm reads has no gradient, and the other way round.
    const at::Tensor around = grads[0].defined() ? grads[0].contiguous() : grads[0];
    const at::Tensor grad = grads[1].defined() ? grads[1].contiguous() : at::zeros_like(y.defined() ? y : x);
    const int64_t batch = x.size(0), width = x.size(2);
    const at::Tensor dx = at::empty_like(x), dshift = at::empty({batch, width}, scale.options());
    const at::Tensor dscale = at::empty_like(dshift);
    at::Tensor dy, dgate;
    if (y.defined()) {
      dy = at::empty_like(y);
      dgate = at::empty({batch, width}, gate.options());
    }
    mark.outputs(dx, dshift, dscale, dgate, dy);
    const at::Tensor partials = partial_sums({y.defined() ? 3 : 2, batch}, x);
    const at::Tensor none{};
    kAdalnGrad.on(x)({x, none, scale, mean, rstd, gate, y}, {grad, around, dx, dshift, dscale, dgate, dy},
                     partials);
    return {dx, dgate, dy, dshift, dscale, at::Tensor(), at::Tensor()};
  }
};

void check_adaln(const char* who, const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale) {
  check_modulation(who, "shift", x, shift);
  check_modulation(who, "scale", x, scale);
  if (shift.scalar_type() != scale.scalar_type()) {
    fail(who, "shift and scale must have one dtype, got {} and {}", at::toString(shift.scalar_type()),
         at::toString(scale.scalar_type()));
  }
}

bool serves(const at::Tensor& x, const at::Tensor& scale, at::ScalarType out_dtype) {
  return has_kernel(x) && has_kernel(scale) && is_kernel_dtype(out_dtype) && x.numel() > 0 &&
         (!x.is_cuda() || cuda::serves_rows(x, out_dtype));
}

NormedResidual normed_residual(const at::Tensor& x, const std::optional<at::Tensor>& gate,
                               const std::optional<at::Tensor>& y, const at::Tensor& shift,
                               const at::Tensor& scale, double eps, at::ScalarType out_dtype) {
  const variable_list results = NormedResidualFunction::apply(x, gate, y, shift, scale, eps, out_dtype);
  return {results[0], results[1]};
}

}  // namespace

at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype) {
  return adaln_branch(x, shift, scale, eps, out_dtype).normed;
}

NormedResidual adaln_branch(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                            at::ScalarType out_dtype) {
  check_adaln("adaln_modulate", x, shift, scale);
  if (!serves(x, scale, out_dtype)) return {x, reference::adaln_modulate(x, shift, scale, eps, out_dtype)};
  return normed_residual(x, std::nullopt, std::nullopt, shift, scale, eps, out_dtype);
}

NormedResidual gated_residual_adaln(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y,
                                    const at::Tensor& shift, const at::Tensor& scale, double eps,
                                    at::ScalarType out_dtype) {
  check_adaln("gated_residual_adaln", x, shift, scale);
  check_gated_residual("gated_residual_adaln", x, gate, y);
  const bool is_one_pass = serves(x, scale, out_dtype) && has_kernel(gate) && y.scalar_type() == out_dtype;
  return is_one_pass ? normed_residual(x, gate, y, shift, scale, eps, out_dtype)
                     : adaln_branch(gated_residual(x, gate, y), shift, scale, eps, out_dtype);
}

namespace reference {

at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype) {
  const auto math = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = x.to(math);
  const at::Tensor centred = wide - wide.mean(-1, /*keepdim=*/true);
  const at::Tensor rstd = (centred.square().mean(-1, /*keepdim=*/true) + eps).rsqrt();
  return (centred * rstd * (scale.to(math).unsqueeze(1) + 1) + shift.to(math).unsqueeze(1)).to(out_dtype);
}

}  // namespace reference
}  // namespace kiln::ops
