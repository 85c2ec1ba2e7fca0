// Engines of packed_attention: one for each kind of device. Not differentiable; packed_attention ties them
// together.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops {

// On CUDA ATen's kernels: flash attention (Dao 2023), cuDNN's, or the memory-efficient ones.
enum class AttentionEngine : int64_t { kNone, kCpu, kFlash, kCudnn, kMemoryEfficient };

// What forward leaves for backward.
struct AttentionResult {
  at::Tensor out;           // (B, N, H * d) contiguous, dtype of qkv
  at::Tensor log_sum;       // (B, H, N) or as the engine likes: log of the softmax sums
  at::Tensor seed, offset;  // random state that ATen's CUDA kernels want back (no dropout here), or undefined
};

// qkv (B, N, 3, H, d) as q, k or v (B, H, N, d), a view.
inline at::Tensor attention_heads(const at::Tensor& qkv, int64_t which) {
  return qkv.select(2, which).transpose(1, 2);
}

namespace cpu {
bool attention_serves(const at::Tensor& qkv);  // qkv contiguous
AttentionResult attention(const at::Tensor& qkv, double scale);
// grad_out like result.out, contiguous; the result like qkv.
at::Tensor attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                              const AttentionResult& result, double scale);
}  // namespace cpu

namespace cuda {
// What ATen would take on this GPU for a training step: kNone where it has no fused kernel. It does not
// depend on whether a gradient is wanted now, so that a recomputed forward gives the same bits. The choice of
// forward is to be kept for backward: it follows settings that may change in between.
AttentionEngine attention_engine(const at::Tensor& qkv, double scale);
AttentionEngine engine_of_backend(int64_t backend);  // an at::SDPBackend
AttentionResult attention(const at::Tensor& qkv, double scale, AttentionEngine engine);
at::Tensor attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                              const AttentionResult& result, double scale, AttentionEngine engine);
}  // namespace cuda

}  // namespace kiln::ops
