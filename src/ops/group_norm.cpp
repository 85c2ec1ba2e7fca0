#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kPixelsPerPartial = 1024;  // channels-last; fixed, so that the thread count does not matter

struct Affine {
  int64_t num_groups;
  at::Tensor weight, bias;  // (C) contiguous, in affine_dtype()
  double eps;
  bool silu;
};

void forward_contiguous(const at::Tensor& x, const Affine& affine, const at::Tensor& out) {
  const int64_t channels = x.size(1) / affine.num_groups, pixels = x.size(2) * x.size(3);
  const Dtype dtype = from_scalar_type(x.scalar_type());
  const size_t group_bytes = channels * pixels * dtype_size(dtype);
  const float* weight = affine.weight.const_data_ptr<float>();
  const float* bias = affine.bias.const_data_ptr<float>();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_pieces(x.size(0) * affine.num_groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % affine.num_groups * channels;
      cpu::group_norm_contiguous(from + i * group_bytes, to + i * group_bytes, dtype, weight + channel,
                                 bias + channel, affine.eps, affine.silu, channels, pixels);
    }
  });
}

// Combines the moments of a group's channels over all partials of one picture, in fixed order, into the
// factor and offset of each channel.
void channel_factors(const double* mean, const double* m2, int64_t num_partials, int64_t pixels,
                     int64_t num_channels, const Affine& affine, float* factor, float* offset) {
  const int64_t channels = num_channels / affine.num_groups;
  const float* weight = affine.weight.const_data_ptr<float>();
  const float* bias = affine.bias.const_data_ptr<float>();
  for (int64_t first = 0; first < num_channels; first += channels) {
    double count = 0, group_mean = 0, group_m2 = 0;
    for (int64_t p = 0; p < num_partials; ++p) {
      const double n = std::min(kPixelsPerPartial, pixels - p * kPixelsPerPartial);
      for (int64_t c = first; c < first + channels; ++c) {
        const double delta = mean[p * num_channels + c] - group_mean, total = count + n;
        group_mean += delta * n / total;
        group_m2 += m2[p * num_channels + c] + delta * delta * count * n / total;
        count = total;
      }
    }
    const double rstd = 1 / std::sqrt(group_m2 / count + affine.eps);
    for (int64_t c = first; c < first + channels; ++c) {
      factor[c] = weight[c] * rstd;
      offset[c] = bias[c] - weight[c] * rstd * group_mean;
    }
  }
}

void forward_channels_last(const at::Tensor& x, const Affine& affine, const at::Tensor& out) {
  const int64_t batch = x.size(0), channels = x.size(1), pixels = x.size(2) * x.size(3);
  const int64_t num_partials = at::divup(pixels, kPixelsPerPartial);
  const Dtype dtype = from_scalar_type(x.scalar_type());
  const size_t pixel_bytes = channels * dtype_size(dtype);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  std::vector<double> mean(batch * num_partials * channels), m2(mean.size());
  std::vector<float> factor(batch * channels), offset(factor.size());
  // Calls body(picture, first pixel, number of pixels, index of the partial).
  const auto for_each_partial = [&](auto&& body) {
    parallel_pieces(batch * num_partials, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % num_partials * kPixelsPerPartial;
        body(i / num_partials, first, std::min(kPixelsPerPartial, pixels - first), i);
      }
    });
  };
  for_each_partial([&](int64_t b, int64_t first, int64_t count, int64_t i) {
    cpu::channel_moments(from + (b * pixels + first) * pixel_bytes, dtype, mean.data() + i * channels,
                         m2.data() + i * channels, channels, count);
  });
  for (int64_t b = 0; b < batch; ++b) {
    channel_factors(mean.data() + b * num_partials * channels, m2.data() + b * num_partials * channels,
                    num_partials, pixels, channels, affine, factor.data() + b * channels,
                    offset.data() + b * channels);
  }
  for_each_partial([&](int64_t b, int64_t first, int64_t count, int64_t) {
    const size_t at = (b * pixels + first) * pixel_bytes;
    cpu::channel_affine(from + at, to + at, dtype, factor.data() + b * channels, offset.data() + b * channels,
                        affine.silu, channels, count);
  });
}

void group_norm_on_cpu(const at::Tensor& x, const Affine& affine, const at::Tensor& out) {
  x.is_contiguous() ? forward_contiguous(x, affine, out) : forward_channels_last(x, affine, out);
}

constexpr Kernel<decltype(group_norm_on_cpu)> kGroupNorm{.cpu = group_norm_on_cpu};

// The format in which the kernels take x and its gradient. ATen's for CUDA reads contiguous tensors only.
at::MemoryFormat kernel_format(const at::Tensor& x) {
  return computes_on_cuda(x) ? at::MemoryFormat::Contiguous : x.suggest_memory_format();
}

// The dtype in which the kernels take weight and bias and keep statistics. ATen's for CUDA takes one dtype
// for all and accumulates in f32.
at::ScalarType affine_dtype(const at::Tensor& x) {
  return computes_on_cuda(x) ? x.scalar_type() : at::kFloat;
}

// The results of ATen's own group norm for the same input: the output before SiLU in x's dtype, and mean and
// reciprocal deviation (B, groups).
struct Normalised {
  at::Tensor y, mean, rstd;
};

// x is in kernel_format().
Normalised normalised(const at::Tensor& x, const Affine& affine) {
  auto [y, mean, rstd] = at::native_group_norm(x, affine.weight, affine.bias, x.size(0), x.size(1),
                                               x.size(2) * x.size(3), affine.num_groups, affine.eps);
  return {y, mean, rstd};
}

// For devices without a kernel.
at::Tensor composed_forward(const at::Tensor& x, const Affine& affine) {
  at::Tensor y = normalised(x.contiguous(kernel_format(x)), affine).y;
  if (affine.silu) at::silu_(y);
  return y.contiguous(x.suggest_memory_format());
}

// Forward saves nothing but the input; backward normalises it again.
class GroupNormSilu : public torch::autograd::Function<GroupNormSilu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, int64_t num_groups,
                            const at::Tensor& weight, const at::Tensor& bias, double eps, bool silu) {
    const at::Tensor x = x_in.contiguous(x_in.suggest_memory_format());
    ctx->save_for_backward({x, weight, bias});
    ctx->saved_data["num_groups"] = num_groups;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["silu"] = silu;
    const Affine affine = affine_of(ctx, x, weight, bias);
    const auto kernel = kGroupNorm.on(x);
    if (!kernel) return composed_forward(x, affine);
    at::Tensor out = at::empty_like(x);
    kernel(x, affine, out);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x_in = saved[0], &weight = saved[1], &bias = saved[2];
    OpMark mark("kiln::group_norm_silu_backward", grads[0], x_in);
    mark.outputs(grads[0]);  // the gradient of x is like the incoming one
    const Affine affine = affine_of(ctx, x_in, weight, bias);
    const at::Tensor x = x_in.contiguous(kernel_format(x_in));
    const Normalised forward = normalised(x, affine);
    at::Tensor grad = grads[0].to(x.scalar_type()).contiguous(kernel_format(x_in));
    if (affine.silu) grad = at::silu_backward(grad, forward.y);
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};  // indices count tensor arguments only
    auto [grad_x, grad_weight, grad_bias] =
        at::native_group_norm_backward(grad, x, forward.mean, forward.rstd, affine.weight, x.size(0),
                                       x.size(1), x.size(2) * x.size(3), affine.num_groups, wanted);
    if (wanted[0]) grad_x = grad_x.contiguous(x_in.suggest_memory_format());
    if (wanted[1]) grad_weight = grad_weight.to(weight.scalar_type());
    if (wanted[2]) grad_bias = grad_bias.to(bias.scalar_type());
    return {grad_x, at::Tensor(), grad_weight, grad_bias, at::Tensor(), at::Tensor()};
  }

 private:
  static Affine affine_of(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
    const at::ScalarType dtype = affine_dtype(x);
    return {.num_groups = ctx->saved_data["num_groups"].toInt(),
            .weight = weight.to(dtype).contiguous(),
            .bias = bias.to(dtype).contiguous(),
            .eps = ctx->saved_data["eps"].toDouble(),
            .silu = ctx->saved_data["silu"].toBool()};
  }
};

}  // namespace

at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu) {
  if (x.dim() != 4) {
    fail("group_norm_silu", "x must have 4 dimensions (B, C, H, W) but has {}", x.dim());
  }
  const int64_t channels = x.size(1);
  if (num_groups < 1 || channels % num_groups != 0) {
    fail("group_norm_silu", "the number of groups must divide the {} channels, got {}", channels, num_groups);
  }
  if (weight.numel() != channels || bias.numel() != channels) {
    fail("group_norm_silu", "weight and bias must have {} elements, got {} and {}", channels, weight.numel(),
         bias.numel());
  }
  OpMark mark("kiln::group_norm_silu", x, weight, bias);
  mark.outputs(x);  // the result is like x
  if (!is_kernel_dtype(x.scalar_type()) || x.numel() == 0) {
    return reference::group_norm_silu(x, num_groups, weight, bias, eps, silu);
  }
  return GroupNormSilu::apply(x, num_groups, weight, bias, eps, silu);
}

namespace reference {

at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu) {
  const auto math = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t batch = x.size(0), channels = x.size(1);
  const at::Tensor groups = x.to(math).reshape({batch, num_groups, -1});
  const at::Tensor centred = groups - groups.mean(-1, /*keepdim=*/true);
  const at::Tensor rstd = (centred.square().mean(-1, /*keepdim=*/true) + eps).rsqrt();
  const at::Tensor normalised = (centred * rstd).view(x.sizes());
  const at::Tensor y =
      normalised * weight.to(math).view({1, channels, 1, 1}) + bias.to(math).view({1, channels, 1, 1});
  return (silu ? y * y.sigmoid() : y).to(x.scalar_type()).contiguous(x.suggest_memory_format());
}

}  // namespace reference
}  // namespace kiln::ops
