#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/kernel_types.h"
#include "ops/modulation.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kAdalnGrainRows = 16;

// Backward does not read shift.
AdalnArgs kernel_args(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                      const at::Tensor& mean, const at::Tensor& rstd) {
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

void forward_cpu(const AdalnArgs& args, const at::Tensor& out) {
  void* to = out.mutable_data_ptr();
  const Dtype out_dtype = from_scalar_type(out.scalar_type());
  at::parallel_for(0, out.size(0) * out.size(1), kAdalnGrainRows,
                   [&](int64_t begin, int64_t end) { cpu::adaln(args, to, out_dtype, begin, end); });
}

void backward_cpu(const AdalnArgs& args, const at::Tensor& grad, const at::Tensor& dx,
                  const at::Tensor& dshift, const at::Tensor& dscale, const at::Tensor& partials) {
  const int64_t num_partials = partials.size(2), rows = args.rows_per_batch, width = args.width;
  float* shift_sums = partials[0].mutable_data_ptr<float>();
  float* scale_sums = partials[1].mutable_data_ptr<float>();
  const void* g = grad.const_data_ptr();
  const Dtype grad_dtype = from_scalar_type(grad.scalar_type());
  void* to = dx.mutable_data_ptr();
  at::parallel_for(0, partials.size(1) * num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % num_partials * kRowsPerPartial;
      const int64_t row = task / num_partials * rows + first;
      cpu::adaln_grad(args, g, grad_dtype, to, shift_sums + task * width, scale_sums + task * width, row,
                      row + std::min(kRowsPerPartial, rows - first));
    }
  });
  sum_partials(partials[0], dshift);
  sum_partials(partials[1], dscale);
}

class AdalnModulate : public torch::autograd::Function<AdalnModulate> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& shift_in,
                            const at::Tensor& scale_in, double eps, at::ScalarType out_dtype) {
    OpMark mark("kiln::adaln_modulate", x_in, shift_in, scale_in);
    const at::Tensor x = x_in.contiguous();
    const at::Tensor shift = unit_stride_rows(shift_in), scale = unit_stride_rows(scale_in);
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(out_dtype));
    const at::Tensor mean = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
    const at::Tensor rstd = at::empty_like(mean);
    mark.outputs(out, mean, rstd);
    ctx->save_for_backward({x, scale, mean, rstd});
    if (x.is_cpu()) {
      forward_cpu(kernel_args(x, shift, scale, eps, mean, rstd), out);
    } else if (x.is_cuda()) {
      cuda::adaln(kernel_args(x, shift, scale, eps, mean, rstd), out);
    }
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &scale = saved[1], &mean = saved[2], &rstd = saved[3];
    OpMark mark("kiln::adaln_modulate_backward", grads[0], x, scale, mean, rstd);
    const at::Tensor grad = grads[0].contiguous();
    const int64_t batch = x.size(0), width = x.size(2);
    const at::Tensor dx = at::empty_like(x), dshift = at::empty({batch, width}, scale.options());
    const at::Tensor dscale = at::empty_like(dshift);
    mark.outputs(dx, dshift, dscale);
    const at::Tensor partials =
        at::empty({2, batch, at::divup(x.size(1), kRowsPerPartial), width}, mean.options());
    if (x.is_cpu()) {
      backward_cpu(kernel_args(x, {}, scale, 0, mean, rstd), grad, dx, dshift, dscale, partials);
    } else if (x.is_cuda()) {
      cuda::adaln_grad(kernel_args(x, {}, scale, 0, mean, rstd), grad, dx, dshift, dscale, partials,
                       kRowsPerPartial);
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
