#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/kernel_types.h"
#include "ops/modulation.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kGrainRows = 16;

cpu::Adaln kernel_args(const at::Tensor& x, const at::Tensor& scale, double eps, const at::Tensor& mean,
                       const at::Tensor& rstd) {
  return {.x = x.const_data_ptr(),
          .x_dtype = from_scalar_type(x.scalar_type()),
          .shift = nullptr,
          .scale = scale.const_data_ptr(),
          .modulation_dtype = from_scalar_type(scale.scalar_type()),
          .shift_stride = 0,
          .scale_stride = static_cast<size_t>(scale.stride(0)),
          .rows_per_batch = static_cast<size_t>(x.size(1)),
          .width = static_cast<size_t>(x.size(2)),
          .eps = static_cast<float>(eps),
          .mean = mean.mutable_data_ptr<float>(),
          .rstd = rstd.mutable_data_ptr<float>()};
}

void forward_cpu(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                 const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& out) {
  cpu::Adaln args = kernel_args(x, scale, eps, mean, rstd);
  args.shift = shift.const_data_ptr();
  args.shift_stride = shift.stride(0);
  void* to = out.mutable_data_ptr();
  const Dtype out_dtype = from_scalar_type(out.scalar_type());
  at::parallel_for(0, x.size(0) * x.size(1), kGrainRows,
                   [&](int64_t begin, int64_t end) { cpu::adaln(args, to, out_dtype, begin, end); });
}

// (dshift, dscale)
std::pair<at::Tensor, at::Tensor> backward_cpu(const at::Tensor& x, const at::Tensor& scale,
                                               const at::Tensor& mean, const at::Tensor& rstd,
                                               const at::Tensor& grad, const at::Tensor& dx) {
  const cpu::Adaln args = kernel_args(x, scale, 0, mean, rstd);
  const int64_t batch = x.size(0), rows = x.size(1), width = x.size(2);
  const int64_t num_partials = at::divup(rows, kRowsPerPartial);
  const at::Tensor partials = at::empty({2, batch, num_partials, width}, mean.options());
  float* dshift = partials.mutable_data_ptr<float>();
  float* dscale = dshift + batch * num_partials * width;
  const void* g = grad.const_data_ptr();
  const Dtype grad_dtype = from_scalar_type(grad.scalar_type());
  void* to = dx.mutable_data_ptr();
  at::parallel_for(0, batch * num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % num_partials * kRowsPerPartial;
      const int64_t row = task / num_partials * rows + first;
      cpu::adaln_grad(args, g, grad_dtype, to, dshift + task * width, dscale + task * width, row,
                      row + std::min(kRowsPerPartial, rows - first));
    }
  });
  return {sum_partials(partials[0], scale.scalar_type()), sum_partials(partials[1], scale.scalar_type())};
}

class AdalnModulate : public torch::autograd::Function<AdalnModulate> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& shift_in,
                            const at::Tensor& scale_in, double eps, at::ScalarType out_dtype) {
    const at::Tensor x = x_in.contiguous();
    const at::Tensor shift = unit_stride_rows(shift_in), scale = unit_stride_rows(scale_in);
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(out_dtype));
    const at::Tensor mean = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
    const at::Tensor rstd = at::empty_like(mean);
    ctx->save_for_backward({x, scale, mean, rstd});
    if (x.is_cpu()) {
      forward_cpu(x, shift, scale, eps, mean, rstd, out);
    }
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &scale = saved[1], &mean = saved[2], &rstd = saved[3];
    const at::Tensor grad = grads[0].contiguous();
    const at::Tensor dx = at::empty_like(x);
    at::Tensor dshift, dscale;
    if (x.is_cpu()) {
      std::tie(dshift, dscale) = backward_cpu(x, scale, mean, rstd, grad, dx);
    } else {
      dshift = at::empty({x.size(0), x.size(2)}, scale.options());
      dscale = at::empty_like(dshift);
    }
    return {dx, dshift, dscale, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype) {
  check_modulation("adaln_modulate", "shift", x, shift);
  check_modulation("adaln_modulate", "scale", x, scale);
  if (shift.scalar_type() != scale.scalar_type()) {
    fail("adaln_modulate", "shift and scale must have one dtype, got {} and {}",
         at::toString(shift.scalar_type()), at::toString(scale.scalar_type()));
  }
  if (!has_kernel(x) || !has_kernel(scale) || out_dtype == at::kDouble || x.numel() == 0) {
    return reference::adaln_modulate(x, shift, scale, eps, out_dtype);
  }
  return AdalnModulate::apply(x, shift, scale, eps, out_dtype);
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
