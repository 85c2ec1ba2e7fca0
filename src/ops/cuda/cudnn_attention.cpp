#include "ops/cuda/cudnn_attention.h"

#include "core/aten.h"
#include "ops/cuda/launch.h"

namespace kiln::ops::cuda {

AttentionResult cudnn_attention(const at::Tensor& qkv, double scale) {
  const auto all = at::_scaled_dot_product_cudnn_attention(
      attention_heads(qkv, 0), attention_heads(qkv, 1), attention_heads(qkv, 2), /*attn_bias=*/{},
      /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, /*is_causal=*/false, /*return_debug_mask=*/false,
      scale);
  return {std::get<0>(all).transpose(1, 2).flatten(2).contiguous(), std::get<1>(all), std::get<6>(all),
          std::get<7>(all)};
}

AttentionGrads cudnn_attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                        const AttentionResult& result, double scale) {
  const int64_t num_tokens = qkv.size(1);
  const auto heads = [&](const at::Tensor& tokens) {
    return tokens.view({qkv.size(0), num_tokens, qkv.size(3), qkv.size(4)}).transpose(1, 2);
  };
  AttentionGrads grads;
  std::tie(grads.q, grads.k, grads.v) = at::_scaled_dot_product_cudnn_attention_backward(
      heads(grad_out), attention_heads(qkv, 0), attention_heads(qkv, 1), attention_heads(qkv, 2),
      heads(result.out), result.log_sum, result.seed, result.offset, /*attn_bias=*/{}, /*cum_seq_q=*/{},
      /*cum_seq_k=*/{}, num_tokens, num_tokens, /*dropout_p=*/0.0, /*is_causal=*/false, scale);
  return grads;
}

at::Tensor packed(const AttentionGrads& grads) {
  const auto is_dense = [](const at::Tensor& part) { return part.stride(3) == 1; };
  if (kernels_compiled() && is_dense(grads.q) && is_dense(grads.k) && is_dense(grads.v))
    return pack_heads(grads.q, grads.k, grads.v);
  return at::stack({grads.q.transpose(1, 2), grads.k.transpose(1, 2), grads.v.transpose(1, 2)}, 2);
}

}  // namespace kiln::ops::cuda
