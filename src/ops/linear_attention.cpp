#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr double kEps = 1e-15;  // of the reference; it only keeps 0 / 0 from being NaN

// Returns the tensor, or a copy if the kernels cannot read its strides: the elements of a token's heads must
// be dense, as in a part of a packed projection.
at::Tensor unit_stride(const at::Tensor& tensor) {
  return tensor.stride(3) == 1 && tensor.stride(2) == tensor.size(3) ? tensor : tensor.contiguous();
}

cpu::HeadTokens head_of(const at::Tensor& tensor, int64_t b, int64_t h) {
  const int64_t element = b * tensor.stride(0) + h * tensor.stride(2);
  return {.data = static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size(),
          .stride = static_cast<size_t>(tensor.stride(1))};
}

// Calls body(b, h) for every head of every sample.
template <class Body>
void for_each_head(const at::Tensor& q, const Body& body) {
  const int64_t num_heads = q.size(2);
  kLoop.on(q)(q.size(0) * num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i / num_heads, i % num_heads);
  });
}

cpu::LinearAttentionShape shape_of(const at::Tensor& q) {
  return {.dtype = from_scalar_type(q.scalar_type()),
          .num_tokens = static_cast<size_t>(q.size(1)),
          .head_dim = static_cast<size_t>(q.size(3))};
}

// The gradients of the reference, for devices and dtypes without a kernel.
tensor_list composed_grads(const at::Tensor& grad, const at::Tensor& q_in, const at::Tensor& k_in,
                           const at::Tensor& v_in) {
  const auto math = q_in.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto heads = [&](const at::Tensor& tokens) { return tokens.to(math).transpose(1, 2); };
  const at::Tensor q = heads(q_in).clamp_min(0), k = heads(k_in).clamp_min(0), v = heads(v_in);
  const at::Tensor products = at::matmul(k.transpose(-2, -1), v);  // (B, H, d, d)
  const at::Tensor sums = k.sum(2, /*keepdim=*/true);              // (B, H, 1, d)
  const at::Tensor denominator = at::matmul(q, sums.transpose(-2, -1)) + kEps;
  const at::Tensor of_numerator = heads(grad.view(q_in.sizes())) / denominator;
  const at::Tensor of_denominator =
      (of_numerator * at::matmul(q, products)).sum(-1, /*keepdim=*/true).div_(denominator).neg_();
  const at::Tensor of_products = at::matmul(q.transpose(-2, -1), of_numerator);
  const at::Tensor of_sums = at::matmul(of_denominator.transpose(-2, -1), q);
  const auto tokens = [&](const at::Tensor& of_heads) {
    return of_heads.to(q_in.scalar_type()).transpose(1, 2).contiguous();
  };
  const at::Tensor grad_q = at::matmul(of_numerator, products.transpose(-2, -1)) + of_denominator * sums;
  const at::Tensor grad_k = at::matmul(v, of_products.transpose(-2, -1)) + of_sums;
  return {tokens(at::threshold_backward(grad_q, q, 0)), tokens(at::threshold_backward(grad_k, k, 0)),
          tokens(at::matmul(k, of_products))};
}

// Saves q, k and v. The sums over tokens are as cheap to compute again as to keep. Where there is no kernel
// it consists of ATen's operations, and is recorded as those.
struct ReluLinearAttention : torch::autograd::Function<ReluLinearAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q_in, const at::Tensor& k_in,
                            const at::Tensor& v_in) {
    if (!has_cpu_kernel(q_in)) {
      ctx->save_for_backward({q_in, k_in, v_in});
      return reference::relu_linear_attention(q_in, k_in, v_in);
    }
    OpMark mark("kiln::relu_linear_attention", q_in, k_in, v_in);
    const at::Tensor q = unit_stride(q_in), k = unit_stride(k_in), v = unit_stride(v_in);
    const at::Tensor out = at::empty(q.sizes(), q.options());
    ctx->save_for_backward({q, k, v});
    for_each_head(q, [&](int64_t b, int64_t h) {
      cpu::linear_attention(shape_of(q), head_of(q, b, h), head_of(k, b, h), head_of(v, b, h),
                            head_of(out, b, h));
    });
    mark.outputs(out);
    return out.flatten(2);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    if (!has_cpu_kernel(q)) return composed_grads(grads[0].contiguous(), q, k, v);
    OpMark mark("kiln::relu_linear_attention_backward", grads[0], q, k, v);
    const at::Tensor grad = grads[0].contiguous().view(q.sizes());
    const at::Tensor grad_q = at::empty(q.sizes(), q.options()), grad_k = at::empty(q.sizes(), q.options()),
                     grad_v = at::empty(q.sizes(), q.options());
    for_each_head(q, [&](int64_t b, int64_t h) {
      cpu::linear_attention_grad(shape_of(q), head_of(q, b, h), head_of(k, b, h), head_of(v, b, h),
                                 head_of(grad, b, h), head_of(grad_q, b, h), head_of(grad_k, b, h),
                                 head_of(grad_v, b, h));
    });
    mark.outputs(grad_q, grad_k, grad_v);
    return {grad_q, grad_k, grad_v};
  }
};

}  // namespace

at::Tensor relu_linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.dim() != 4 || k.sizes() != q.sizes() || v.sizes() != q.sizes() ||
      k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type())
    fail("relu_linear_attention", "expected q, k, v (B, N, H, d) of one dtype, got ({}), ({}), ({})",
         fmt::join(q.sizes(), ", "), fmt::join(k.sizes(), ", "), fmt::join(v.sizes(), ", "));
  return q.numel() > 0 ? ReluLinearAttention::apply(q, k, v) : reference::relu_linear_attention(q, k, v);
}

namespace reference {

at::Tensor relu_linear_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in) {
  const auto math = q_in.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor q = q_in.to(math).clamp_min(0).transpose(1, 2),  // (B, H, N, d)
      k = k_in.to(math).clamp_min(0).transpose(1, 2), v = v_in.to(math).transpose(1, 2);
  const at::Tensor products = at::matmul(k.transpose(-2, -1), v);  // (B, H, d, d)
  const at::Tensor numerator = at::matmul(q, products);
  const at::Tensor denominator = at::matmul(q, k.sum(2).unsqueeze(-1)) + kEps;
  return (numerator / denominator).transpose(1, 2).flatten(2).to(q_in.scalar_type());
}

}  // namespace reference
}  // namespace kiln::ops
