// Attention on CUDA through ATen's fused kernels. They are called through the dispatcher, so building this
// file needs no CUDA. All read the packed projection through strided views.
#include "ops/attention.h"

#include <ATen/SDPBackend.h>
#include <ATen/ops/_efficient_attention_backward.h>

#include <array>
#include <atomic>
#include <stdexcept>

#include "core/aten.h"
#include "ops/cuda/launch.h"

namespace kiln::ops::cuda {
namespace {

struct Heads {  // each (B, H, N, d), views of the packed projection
  at::Tensor q, k, v;
};
Heads heads_of(const at::Tensor& qkv) {
  return {attention_heads(qkv, 0), attention_heads(qkv, 1), attention_heads(qkv, 2)};
}

constexpr std::array kEngineNames{"composed", "cpu", "flash", "cudnn", "memory-efficient"};
std::array<std::atomic<bool>, kEngineNames.size()> engines_seen;

// The three gradients as parts of one memory (B, N, 3, H, d), which ATen makes.
at::Tensor packed_efficient_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                     const AttentionResult& result, double scale) {
  constexpr int64_t kNoMask = 0;  // sdp::CustomMaskType
  const int64_t num_tokens = qkv.size(1);
  const auto rows = [&](const at::Tensor& tokens) {  // (B, N, H, d)
    return tokens.view({qkv.size(0), num_tokens, qkv.size(3), qkv.size(4)});
  };
  const at::Tensor grad_q = std::get<0>(at::_efficient_attention_backward(
      rows(grad_out), qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), /*bias=*/{}, rows(result.out),
      /*cu_seqlens_q=*/{}, /*cu_seqlens_k=*/{}, num_tokens, num_tokens, result.log_sum, /*dropout_p=*/0.0,
      result.seed, result.offset, kNoMask, /*bias_requires_grad=*/false, scale, /*num_splits_key=*/{},
      /*window_size=*/{}, /*shared_storage_dqdkdv=*/true));
  return grad_q.as_strided(qkv.sizes(), qkv.strides(), 0);
}

[[noreturn]] void unknown_engine() { throw std::logic_error("packed_attention: not an engine of CUDA"); }

}  // namespace

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

AttentionEngine engine_of_backend(int64_t backend) {
  switch (static_cast<at::SDPBackend>(backend)) {
    case at::SDPBackend::flash_attention:
      return AttentionEngine::kFlash;
    case at::SDPBackend::cudnn_attention:
      return AttentionEngine::kCudnn;
    case at::SDPBackend::efficient_attention:
      return AttentionEngine::kMemoryEfficient;
    case at::SDPBackend::math:  // bf16 on Turing, head widths that no kernel takes
    case at::SDPBackend::error:
    case at::SDPBackend::overrideable:
      return AttentionEngine::kNone;
  }
  return AttentionEngine::kNone;
}

AttentionEngine attention_engine(const at::Tensor& qkv, double scale) {
  const at::AutoGradMode with_graph(true);
  const auto [q, k, v] = heads_of(qkv.detach().requires_grad_());
  const AttentionEngine engine = engine_of_backend(
      at::_fused_sdp_choice(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/false, scale));
  engines_seen[static_cast<size_t>(engine)] = true;
  return engine;
}

std::vector<std::string> engines_used() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kEngineNames.size(); ++i)
    if (engines_seen[i]) names.emplace_back(kEngineNames[i]);
  return names;
}

AttentionResult attention(const at::Tensor& qkv, double scale, AttentionEngine engine) {
  const auto [q, k, v] = heads_of(qkv);
  AttentionResult result;
  switch (engine) {
    case AttentionEngine::kFlash: {
      const auto flash = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, false, false, scale);
      result = {std::get<0>(flash), std::get<1>(flash), std::get<6>(flash), std::get<7>(flash)};
      break;
    }
    case AttentionEngine::kCudnn:
      return cudnn_attention(qkv, scale);
    case AttentionEngine::kMemoryEfficient:
      std::tie(result.out, result.log_sum, result.seed, result.offset) =
          at::_scaled_dot_product_efficient_attention(q, k, v, {}, true, 0.0, false, scale);
      break;
    default:
      unknown_engine();
  }
  result.out = result.out.transpose(1, 2).flatten(2).contiguous();
  return result;
}

at::Tensor cudnn_packed_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                 const AttentionResult& result, double scale) {
  const at::Tensor grad_qkv = at::empty_like(qkv);
  const bool is_served = result.log_sum.is_contiguous() &&
                         attention_grads(qkv, result.out, result.log_sum, grad_out, scale, grad_qkv);
  return is_served ? grad_qkv : at::Tensor();
}

AttentionGrads attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                  const AttentionResult& result, const AttentionPass& pass) {
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  const auto heads = [&](const at::Tensor& tokens) {
    return tokens.view({batch, num_tokens, num_heads, head_dim}).transpose(1, 2);
  };
  const auto [q, k, v] = heads_of(qkv);
  AttentionGrads grads;
  switch (pass.engine) {
    case AttentionEngine::kFlash:
      std::tie(grads.q, grads.k, grads.v) = at::_scaled_dot_product_flash_attention_backward(
          heads(grad_out), q, k, v, heads(result.out), result.log_sum, {}, {}, num_tokens, num_tokens, 0.0,
          false, result.seed, result.offset, pass.scale);
      return grads;
    case AttentionEngine::kCudnn:
      if (pass.packs) grads.packed = cudnn_packed_backward(grad_out, qkv, result, pass.scale);
      return grads.packed.defined() ? grads : cudnn_attention_backward(grad_out, qkv, result, pass.scale);
    case AttentionEngine::kMemoryEfficient:
      if (pass.packs) {
        grads.packed = packed_efficient_backward(grad_out, qkv, result, pass.scale);
        return grads;
      }
      std::tie(grads.q, grads.k, grads.v, std::ignore) = at::_scaled_dot_product_efficient_attention_backward(
          heads(grad_out), q, k, v, {}, heads(result.out), result.log_sum, result.seed, result.offset, 0.0,
          {true, true, true, false}, false, pass.scale);
      return grads;
    default:
      unknown_engine();
  }
}

}  // namespace kiln::ops::cuda
