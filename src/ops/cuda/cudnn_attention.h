// Attention by cuDNN, through ATen: on Hopper its kernels are faster than flash attention's, and they take
// head widths that are not a multiple of 32 without padding. Reached by the dispatcher: no CUDA is needed to
// build this.
#pragma once
#include "ops/attention.h"

namespace kiln::ops::cuda {

// qkv (B, N, 3, H, d) bf16 or fp16, d a multiple of 8. Throws c10::Error where cuDNN has no engine for it:
// at::_fused_sdp_choice says so before.
AttentionResult cudnn_attention(const at::Tensor& qkv, double scale);

// The gradients of q, k and v (B, H, N, d), of strides as cuDNN leaves them: pack_heads() follows.
struct AttentionGrads {
  at::Tensor q, k, v;
};
AttentionGrads cudnn_attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                        const AttentionResult& result, double scale);

// (B, N, 3, H, d) of all three, by one kernel where there is one.
at::Tensor packed(const AttentionGrads& grads);

}  // namespace kiln::ops::cuda
