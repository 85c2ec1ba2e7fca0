// Attention on CUDA through ATen's fused kernels, reached by the dispatcher: this file needs no CUDA to be
// built. fp16 and bf16 take flash attention (Dao 2023) where the GPU has it (Ampere and later), f32 and older
// GPUs the memory-efficient kernels; both read the packed projection through strided views.

#include "ops/attention.h"

#include "core/aten.h"

namespace kiln::ops::cuda {
namespace {

// ATen's own choice knows the GPU: on Volta and Turing fp16 has no flash kernel.
bool is_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  constexpr int64_t kEfficient = 2;  // at::SDPBackend
  return q.scalar_type() != at::kFloat && at::_fused_sdp_choice(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0,
                                                                /*is_causal=*/false, scale) != kEfficient;
}

}  // namespace

bool attention_serves(const at::Tensor& qkv) {
  const at::ScalarType dtype = qkv.scalar_type();
  const int64_t head_dim = qkv.size(4);
  if (dtype == at::kHalf || dtype == at::kBFloat16) return head_dim % 8 == 0 && head_dim <= 256;
  return dtype == at::kFloat && head_dim % 4 == 0;
}

AttentionResult attention(const at::Tensor& qkv, double scale) {
  const at::Tensor q = attention_heads(qkv, 0), k = attention_heads(qkv, 1), v = attention_heads(qkv, 2);
  AttentionResult result;
  if (is_flash(q, k, v, scale)) {
    const auto flash = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, false, false, scale);
    result = {std::get<0>(flash), std::get<1>(flash), std::get<6>(flash), std::get<7>(flash)};
  } else {
    std::tie(result.out, result.log_sum, result.seed, result.offset) =
        at::_scaled_dot_product_efficient_attention(q, k, v, {}, true, 0.0, false, scale);
  }
  result.out = result.out.transpose(1, 2).flatten(2).contiguous();
  return result;
}

at::Tensor attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                              const AttentionResult& result, double scale) {
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  const auto heads = [&](const at::Tensor& tokens) {
    return tokens.view({batch, num_tokens, num_heads, head_dim}).transpose(1, 2);
  };
  const at::Tensor q = attention_heads(qkv, 0), k = attention_heads(qkv, 1), v = attention_heads(qkv, 2);
  at::Tensor grad_q, grad_k, grad_v;
  if (is_flash(q, k, v, scale)) {
    std::tie(grad_q, grad_k, grad_v) = at::_scaled_dot_product_flash_attention_backward(
        heads(grad_out), q, k, v, heads(result.out), result.log_sum, {}, {}, num_tokens, num_tokens, 0.0,
        false, result.seed, result.offset, scale);
  } else {
    std::tie(grad_q, grad_k, grad_v, std::ignore) = at::_scaled_dot_product_efficient_attention_backward(
        heads(grad_out), q, k, v, {}, heads(result.out), result.log_sum, result.seed, result.offset, 0.0,
        {true, true, true, false}, false, scale);
  }
  const at::Tensor grad_qkv = at::empty_like(qkv);
  attention_heads(grad_qkv, 0).copy_(grad_q);
  attention_heads(grad_qkv, 1).copy_(grad_k);
  attention_heads(grad_qkv, 2).copy_(grad_v);
  return grad_qkv;
}

}  // namespace kiln::ops::cuda
