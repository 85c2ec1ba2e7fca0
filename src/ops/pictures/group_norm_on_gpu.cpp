#include "ops/pictures/group_norm_on_gpu.h"

#include <ATen/Parallel.h>

#include "core/aten.h"
#include "core/tensors.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

GroupNormArgs group_norm_args(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& mean,
                              const at::Tensor& rstd) {
  const size_t pixels = static_cast<size_t>(x.size(2) * x.size(3));
  return {.x = x.const_data_ptr(),
          .dtype = from_scalar_type(x.scalar_type()),
          .weight = norm.weight.const_data_ptr(),
          .bias = norm.bias.const_data_ptr(),
          .affine_dtype = from_scalar_type(norm.weight.scalar_type()),
          .num_groups = static_cast<size_t>(norm.num_groups),
          .channels = static_cast<size_t>(x.size(1)),
          .pixels = pixels,
          .pixels_per_block = group_norm_pixels_per_block(pixels),
          .eps = static_cast<float>(norm.eps),
          .silu = norm.silu,
          .mean = mean.mutable_data_ptr<float>(),
          .rstd = rstd.mutable_data_ptr<float>()};
}

// Returns memory for two f32 sums of each block of pixels, `width` wide.
at::Tensor block_sums(const at::Tensor& x, int64_t width) {
  const int64_t pixels = x.size(2) * x.size(3);
  const auto per_block = static_cast<int64_t>(group_norm_pixels_per_block(static_cast<size_t>(pixels)));
  return at::empty({2, x.size(0), at::divup(pixels, per_block), width}, x.options().dtype(at::kFloat));
}

struct GroupNormTensors {
  const at::Tensor &x, &mean, &rstd;
};
// The kernels read `out` and write the others; weight and bias are undefined where they are not trained.
struct GroupNormGradTensors {
  const at::Tensor &out, &x, &weight, &bias, &partials, &channel_sums, &group_means;
};

void group_norm_on_cuda(const GroupNormTensors& t, const GroupNormLayer& norm, const at::Tensor& out,
                        const at::Tensor& partials) {
  cuda::group_norm(group_norm_args(t.x, norm, t.mean, t.rstd), out, partials);
}

void group_norm_grad_on_cuda(const GroupNormTensors& t, const GroupNormLayer& norm,
                             const GroupNormGradTensors& grads) {
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  cuda::group_norm_grad(group_norm_args(t.x, norm, t.mean, t.rstd),
                        {.out = grads.out.const_data_ptr(),
                         .x = data(grads.x),
                         .weight = data(grads.weight),
                         .bias = data(grads.bias),
                         .partials = grads.partials.mutable_data_ptr<float>(),
                         .channel_sums = grads.channel_sums.mutable_data_ptr<float>(),
                         .group_means = grads.group_means.mutable_data_ptr<float>()},
                        grads.out);
}

constexpr Kernel<decltype(group_norm_on_cuda)> kChannelsLast{.cuda = group_norm_on_cuda};
constexpr Kernel<decltype(group_norm_grad_on_cuda)> kChannelsLastGrad{.cuda = group_norm_grad_on_cuda};

GroupNormLayer contiguous(const GroupNormLayer& norm) {
  return {.weight = norm.weight.contiguous(),
          .bias = norm.bias.contiguous(),
          .num_groups = norm.num_groups,
          .eps = norm.eps,
          .silu = norm.silu};
}

}  // namespace

bool is_channels_last_on_gpu(const at::Tensor& x, const GroupNormLayer& norm) {
  return x.numel() > 0 && kChannelsLast.serving(x) != nullptr &&
         x.is_contiguous(at::MemoryFormat::ChannelsLast) && is_kernel_dtype(norm.weight.scalar_type()) &&
         norm.weight.scalar_type() == norm.bias.scalar_type() &&
         (!x.is_cuda() || cuda::serves_rows(x.flatten(2).transpose(1, 2), x.scalar_type()));
}

// Marks say that each pass is two over x: one for sums, one for the result.
GroupNormed group_norm_on_gpu(const at::Tensor& x, const GroupNormLayer& norm) {
  OpMark mark("kiln::group_norm_silu", x, x.detach(), norm.weight, norm.bias);
  const at::Tensor out = at::empty_like(x);
  mark.outputs(out);
  const at::Tensor mean = at::empty({x.size(0), norm.num_groups}, x.options().dtype(at::kFloat));
  const at::Tensor rstd = at::empty_like(mean);
  kChannelsLast.on(x)({x, mean, rstd}, contiguous(norm), out, block_sums(x, norm.num_groups));
  return {.out = out, .statistics = {.mean = mean, .rstd = rstd}};
}

GroupNormGrads group_norm_grad_on_gpu(const at::Tensor& grad_in, const at::Tensor& x,
                                      const GroupNormLayer& norm_in, const GroupStatistics& statistics,
                                      std::array<bool, 3> wanted) {
  const auto& [mean, rstd] = statistics;
  const GroupNormLayer norm = contiguous(norm_in);
  const at::Tensor grad = grad_in.to(x.scalar_type()).contiguous(at::MemoryFormat::ChannelsLast);
  OpMark mark("kiln::group_norm_silu_backward", grad, grad.detach(), x, x.detach(), mean, rstd);
  const at::Tensor grad_x = at::empty_like(x);
  at::Tensor grad_weight, grad_bias;
  if (wanted[1] || wanted[2]) {
    grad_weight = at::empty_like(norm.weight);
    grad_bias = at::empty_like(norm.bias);
  }
  mark.outputs(grad_x, grad_weight, grad_bias);
  const at::Tensor channel_sums = at::empty({2, x.size(0), x.size(1)}, mean.options());
  const at::Tensor group_means = at::empty({2, x.size(0), norm.num_groups}, mean.options());
  kChannelsLastGrad.on(x)(
      {x, mean, rstd}, norm,
      {grad, grad_x, grad_weight, grad_bias, block_sums(x, x.size(1)), channel_sums, group_means});
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace kiln::ops
