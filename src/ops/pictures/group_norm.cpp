#include "ops/pictures/group_norm.h"

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
#include "ops/pictures/group_norm_on_gpu.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kPixelsPerPartial = 1024;  // channels-last; fixed, so that the thread count does not matter

void forward_contiguous(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& out) {
  const int64_t channels = x.size(1) / norm.num_groups, pixels = x.size(2) * x.size(3);
  const Dtype dtype = from_scalar_type(x.scalar_type());
  const size_t group_bytes = channels * pixels * dtype_size(dtype);
  const float* weight = norm.weight.const_data_ptr<float>();
  const float* bias = norm.bias.const_data_ptr<float>();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_pieces(x.size(0) * norm.num_groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % norm.num_groups * channels;
      cpu::group_norm_contiguous(from + i * group_bytes, to + i * group_bytes, dtype, weight + channel,
                                 bias + channel, norm.eps, norm.silu, channels, pixels);
    }
  });
}

// What a channels-last norm makes of each picture's channels (B, C): x * factor + offset, where
// factor = weight * rstd.
struct ChannelFactors {
  std::vector<float> factor, offset, mean, rstd;

  explicit ChannelFactors(size_t size) : factor(size), offset(size), mean(size), rstd(size) {}
};

// Combines the moments of a group's channels over all partials of picture b, in fixed order.
void set_factors(const double* mean, const double* m2, int64_t num_partials, int64_t pixels, int64_t b,
                 int64_t num_channels, const GroupNormLayer& norm, ChannelFactors& of) {
  const int64_t channels = num_channels / norm.num_groups;
  const float* weight = norm.weight.const_data_ptr<float>();
  const float* bias = norm.bias.const_data_ptr<float>();
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
    const double rstd = 1 / std::sqrt(group_m2 / count + norm.eps);
    for (int64_t c = first; c < first + channels; ++c) {
      const int64_t i = b * num_channels + c;
      of.factor[i] = weight[c] * rstd;
      of.offset[i] = bias[c] - weight[c] * rstd * group_mean;
      of.mean[i] = group_mean;
      of.rstd[i] = rstd;
    }
  }
}

// The partials of channels-last pictures, which the threads share out.
struct Partials {
  int64_t batch, channels, pixels, per_picture;
  size_t pixel_bytes;

  explicit Partials(const at::Tensor& x)
      : batch(x.size(0)),
        channels(x.size(1)),
        pixels(x.size(2) * x.size(3)),
        per_picture(at::divup(pixels, kPixelsPerPartial)),
        pixel_bytes(static_cast<size_t>(channels * x.element_size())) {}

  // Calls body(picture, offset of the first pixel in bytes, number of pixels, index of the partial).
  template <class Body>
  void for_each(const Body& body) const {
    parallel_pieces(batch * per_picture, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / per_picture, first = i % per_picture * kPixelsPerPartial;
        body(b, (b * pixels + first) * pixel_bytes, std::min(kPixelsPerPartial, pixels - first), i);
      }
    });
  }
};

ChannelFactors channel_factors(const at::Tensor& x, const GroupNormLayer& norm) {
  const Partials partials(x);
  const int64_t channels = partials.channels, num_partials = partials.per_picture;
  const Dtype dtype = from_scalar_type(x.scalar_type());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  std::vector<double> mean(partials.batch * num_partials * channels), m2(mean.size());
  partials.for_each([&](int64_t, size_t at, int64_t count, int64_t i) {
    cpu::channel_moments(from + at, dtype, mean.data() + i * channels, m2.data() + i * channels, channels,
                         count);
  });
  ChannelFactors of(partials.batch * channels);
  for (int64_t b = 0; b < partials.batch; ++b)
    set_factors(mean.data() + b * num_partials * channels, m2.data() + b * num_partials * channels,
                num_partials, partials.pixels, b, channels, norm, of);
  return of;
}

void forward_channels_last(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& out) {
  const ChannelFactors of = channel_factors(x, norm);
  const Dtype dtype = from_scalar_type(x.scalar_type());
  const int64_t channels = x.size(1);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  Partials(x).for_each([&](int64_t b, size_t at, int64_t count, int64_t) {
    cpu::channel_affine(from + at, to + at, dtype, of.factor.data() + b * channels,
                        of.offset.data() + b * channels, norm.silu, channels, count);
  });
}

// What backward adds to the gradient inside the norm: (x - mean) * slope + shift, for each picture's
// channels.
struct GroupTerms {
  std::vector<float> slope, shift;
  std::vector<double> grad_weight, grad_bias;  // (C), summed over the pictures

  GroupTerms(size_t batch, size_t channels)
      : slope(batch * channels), shift(batch * channels), grad_weight(channels), grad_bias(channels) {}
};

// Combines the sums (partials, C) of picture b, in fixed order.
void add_picture(const float* sums, const float* sums_x, const Partials& partials, int64_t b,
                 const GroupNormLayer& norm, const ChannelFactors& of, GroupTerms& terms) {
  const int64_t num_channels = partials.channels, channels = num_channels / norm.num_groups;
  const float* weight = norm.weight.const_data_ptr<float>();
  const double count = static_cast<double>(channels * partials.pixels);
  for (int64_t first = 0; first < num_channels; first += channels) {
    const double rstd = of.rstd[b * num_channels + first];
    double sum = 0, sum_normed = 0;
    for (int64_t c = first; c < first + channels; ++c) {
      double of_bias = 0, of_weight = 0;
      for (int64_t p = 0; p < partials.per_picture; ++p) {
        of_bias += sums[p * num_channels + c];
        of_weight += sums_x[p * num_channels + c] * rstd;
      }
      terms.grad_bias[c] += of_bias;
      terms.grad_weight[c] += of_weight;
      sum += weight[c] * of_bias;
      sum_normed += weight[c] * of_weight;
    }
    for (int64_t c = first; c < first + channels; ++c) {
      terms.slope[b * num_channels + c] = -rstd * rstd * sum_normed / count;
      terms.shift[b * num_channels + c] = -rstd * sum / count;
    }
  }
}

// x, grad and grad_x are channels-last and of one dtype; grad_x may be undefined. The others (C) are f32.
void backward_on_cpu(const at::Tensor& x, const at::Tensor& grad, const GroupNormLayer& norm,
                     const at::Tensor& grad_x, const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const Partials partials(x);
  const int64_t channels = partials.channels, of_picture = partials.per_picture * channels;
  const ChannelFactors of = channel_factors(x, norm);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  const char* of_result = static_cast<const char*>(grad.const_data_ptr());
  const auto picture = [&](int64_t b) {
    return cpu::ChannelNorm{.dtype = from_scalar_type(x.scalar_type()),
                            .silu = norm.silu,
                            .channels = static_cast<size_t>(channels),
                            .factor = of.factor.data() + b * channels,
                            .offset = of.offset.data() + b * channels,
                            .mean = of.mean.data() + b * channels};
  };
  std::vector<float> sums(partials.batch * of_picture), sums_x(sums.size());
  partials.for_each([&](int64_t b, size_t at, int64_t count, int64_t i) {
    cpu::channel_grad_sums(picture(b), from + at, of_result + at, sums.data() + i * channels,
                           sums_x.data() + i * channels, count);
  });
  GroupTerms terms(partials.batch, channels);
  for (int64_t b = 0; b < partials.batch; ++b)
    add_picture(sums.data() + b * of_picture, sums_x.data() + b * of_picture, partials, b, norm, of, terms);
  std::copy_n(terms.grad_weight.begin(), channels, grad_weight.mutable_data_ptr<float>());
  std::copy_n(terms.grad_bias.begin(), channels, grad_bias.mutable_data_ptr<float>());
  if (!grad_x.defined()) return;
  char* to = static_cast<char*>(grad_x.mutable_data_ptr());
  partials.for_each([&](int64_t b, size_t at, int64_t count, int64_t) {
    cpu::channel_grad(picture(b), from + at, of_result + at, terms.slope.data() + b * channels,
                      terms.shift.data() + b * channels, to + at, count);
  });
}

void group_norm_on_cpu(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& out) {
  x.is_contiguous() ? forward_contiguous(x, norm, out) : forward_channels_last(x, norm, out);
}

constexpr Kernel<decltype(group_norm_on_cpu)> kGroupNorm{.cpu = group_norm_on_cpu};
// Takes channels-last tensors only.
constexpr Kernel<decltype(backward_on_cpu)> kGroupNormGrad{.cpu = backward_on_cpu};

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
Normalised normalised(const at::Tensor& x, const GroupNormLayer& norm) {
  auto [y, mean, rstd] = at::native_group_norm(x, norm.weight, norm.bias, x.size(0), x.size(1),
                                               x.size(2) * x.size(3), norm.num_groups, norm.eps);
  return {y, mean, rstd};
}

// For devices without a kernel.
at::Tensor composed_forward(const at::Tensor& x, const GroupNormLayer& norm) {
  at::Tensor y = normalised(x.contiguous(kernel_format(x)), norm).y;
  if (norm.silu) at::silu_(y);
  return y.contiguous(x.suggest_memory_format());
}

// For devices without a kernel. Normalises the input again.
GroupNormGrads composed_backward(const at::Tensor& grad_in, const at::Tensor& x_in,
                                 const GroupNormLayer& norm, std::array<bool, 3> wanted) {
  const at::Tensor x = x_in.contiguous(kernel_format(x_in));
  const Normalised forward = normalised(x, norm);
  at::Tensor grad = grad_in.contiguous(kernel_format(x_in));
  if (norm.silu) grad = at::silu_backward(grad, forward.y);
  auto [grad_x, grad_weight, grad_bias] =
      at::native_group_norm_backward(grad, x, forward.mean, forward.rstd, norm.weight, x.size(0), x.size(1),
                                     x.size(2) * x.size(3), norm.num_groups, wanted);
  if (wanted[0]) grad_x = grad_x.contiguous(x_in.suggest_memory_format());
  return {grad_x, grad_weight, grad_bias};
}

// Returns the norm with weight and bias as the kernels take them.
GroupNormLayer for_kernels(const GroupNormLayer& norm, const at::Tensor& x) {
  const at::ScalarType dtype = affine_dtype(x);
  return {.weight = norm.weight.to(dtype).contiguous(),
          .bias = norm.bias.to(dtype).contiguous(),
          .num_groups = norm.num_groups,
          .eps = norm.eps,
          .silu = norm.silu};
}

// Forward saves nothing but the input and, where backward takes them, its statistics.
struct GroupNormSilu : torch::autograd::Function<GroupNormSilu> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, int64_t num_groups,
                            const at::Tensor& weight, const at::Tensor& bias, double eps, bool silu) {
    const at::Tensor x = x_in.contiguous(x_in.suggest_memory_format());
    ctx->saved_data["num_groups"] = num_groups;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["silu"] = silu;
    const GroupNormed normed = group_norm_forward(x, {weight, bias, num_groups, eps, silu});
    ctx->save_for_backward({x, weight, bias, normed.statistics.mean, normed.statistics.rstd});
    return normed.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const GroupNormLayer norm{.weight = saved[1],
                              .bias = saved[2],
                              .num_groups = ctx->saved_data["num_groups"].toInt(),
                              .eps = ctx->saved_data["eps"].toDouble(),
                              .silu = ctx->saved_data["silu"].toBool()};
    // Indices count tensor arguments only.
    const GroupNormGrads found =
        group_norm_backward(grads[0], saved[0], norm, {.mean = saved[3], .rstd = saved[4]},
                            {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)});
    return {found.x, at::Tensor(), found.weight, found.bias, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

GroupNormed group_norm_forward(const at::Tensor& x_in, const GroupNormLayer& norm_in) {
  if (is_channels_last_on_gpu(x_in, norm_in)) return group_norm_on_gpu(x_in, norm_in);
  OpMark mark("kiln::group_norm_silu", x_in, norm_in.weight, norm_in.bias);
  mark.outputs(x_in);  // the result is like x
  const at::Tensor x = x_in.contiguous(x_in.suggest_memory_format());
  const GroupNormLayer norm = for_kernels(norm_in, x);
  const auto kernel = kGroupNorm.on(x);
  if (!kernel) return {.out = composed_forward(x, norm)};
  const at::Tensor out = at::empty_like(x);
  kernel(x, norm, out);
  return {.out = out};
}

GroupNormGrads group_norm_backward(const at::Tensor& grad_in, const at::Tensor& x_in,
                                   const GroupNormLayer& norm_in, const GroupStatistics& statistics,
                                   std::array<bool, 3> wanted) {
  if (statistics.mean.defined()) return group_norm_grad_on_gpu(grad_in, x_in, norm_in, statistics, wanted);
  OpMark mark("kiln::group_norm_silu_backward", grad_in, x_in);
  mark.outputs(grad_in);  // the gradient of x is like the incoming one
  const GroupNormLayer norm = for_kernels(norm_in, x_in);
  const at::Tensor x = x_in.contiguous(x_in.suggest_memory_format()), grad = grad_in.to(x.scalar_type());
  const auto kernel = kGroupNormGrad.on(x);
  GroupNormGrads found;
  if (kernel && x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    if (wanted[0]) found.x = at::empty_like(x);
    found.weight = at::empty_like(norm.weight);
    found.bias = at::empty_like(norm.bias);
    kernel(x, grad.contiguous(at::MemoryFormat::ChannelsLast), norm, found.x, found.weight, found.bias);
  } else {
    found = composed_backward(grad, x, norm, wanted);
  }
  const auto as = [](const at::Tensor& gradient, const at::Tensor& weight, bool is_wanted) {
    return is_wanted ? gradient.to(weight.scalar_type()) : at::Tensor();
  };
  return {found.x, as(found.weight, norm_in.weight, wanted[1]), as(found.bias, norm_in.bias, wanted[2])};
}

void check_group_norm(const at::Tensor& x, const GroupNormLayer& norm) {
  if (x.dim() != 4) {
    fail("group_norm_silu", "x must have 4 dimensions (B, C, H, W) but has {}", x.dim());
  }
  const int64_t channels = x.size(1);
  if (norm.num_groups < 1 || channels % norm.num_groups != 0) {
    fail("group_norm_silu", "the number of groups must divide the {} channels, got {}", channels,
         norm.num_groups);
  }
  if (norm.weight.numel() != channels || norm.bias.numel() != channels) {
    fail("group_norm_silu", "weight and bias must have {} elements, got {} and {}", channels,
         norm.weight.numel(), norm.bias.numel());
  }
}

at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu) {
  check_group_norm(x, {weight, bias, num_groups, eps, silu});
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
