// Attention to rows whose number differs between samples, through ATen's fused kernels. They are called
// through the dispatcher, so building this file needs no CUDA.
#include "ops/cuda/varlen_attention.h"

#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <stdexcept>

#include "core/aten.h"

namespace kiln::ops::cuda {
namespace {

constexpr int64_t kNoMask = 0;  // sdp::CustomMaskType

[[noreturn]] void unknown_varlen_engine() {
  throw std::logic_error("varlen_attention: not an engine of CUDA");
}

// Adds a batch of one: the memory-efficient kernels take the tokens of all samples as one batch entry.
at::Tensor as_one(const at::Tensor& tokens) { return tokens.unsqueeze(0); }

}  // namespace

AttentionResult varlen_attention(const VarlenTokens& t, AttentionEngine engine) {
  AttentionResult result;
  switch (engine) {
    case AttentionEngine::kFlash:
      std::tie(result.out, result.log_sum, result.seed, result.offset, std::ignore) =
          at::_flash_attention_forward(t.q, t.k, t.v, t.q_offsets, t.k_offsets, t.num_queries, t.most_rows,
                                       /*dropout_p=*/0.0, /*is_causal=*/false, /*return_debug_mask=*/false,
                                       t.scale);
      return result;
    case AttentionEngine::kMemoryEfficient:
      std::tie(result.out, result.log_sum, result.seed, result.offset, std::ignore, std::ignore) =
          at::_efficient_attention_forward(as_one(t.q), as_one(t.k), as_one(t.v), /*bias=*/{}, t.q_offsets,
                                           t.k_offsets, t.num_queries, t.most_rows, /*dropout_p=*/0.0,
                                           kNoMask, /*compute_log_sumexp=*/true, t.scale);
      result.out = result.out.squeeze(0);
      return result;
    default:
      unknown_varlen_engine();
  }
}

VarlenGrads varlen_attention_backward(const at::Tensor& grad_out, const VarlenTokens& t,
                                      const AttentionResult& result, AttentionEngine engine) {
  VarlenGrads grads;
  switch (engine) {
    case AttentionEngine::kFlash:
      std::tie(grads.q, grads.k, grads.v) = at::_flash_attention_backward(
          grad_out, t.q, t.k, t.v, result.out, result.log_sum, t.q_offsets, t.k_offsets, t.num_queries,
          t.most_rows, /*dropout_p=*/0.0, /*is_causal=*/false, result.seed, result.offset, t.scale);
      return grads;
    case AttentionEngine::kMemoryEfficient:
      std::tie(grads.q, grads.k, grads.v, std::ignore) = at::_efficient_attention_backward(
          as_one(grad_out), as_one(t.q), as_one(t.k), as_one(t.v), /*bias=*/{}, as_one(result.out),
          t.q_offsets, t.k_offsets, t.num_queries, t.most_rows, result.log_sum, /*dropout_p=*/0.0,
          result.seed, result.offset, kNoMask, /*bias_requires_grad=*/false, t.scale);
      for (at::Tensor* grad : {&grads.q, &grads.k, &grads.v}) *grad = grad->squeeze(0);
      return grads;
    default:
      unknown_varlen_engine();
  }
}

}  // namespace kiln::ops::cuda
