// The engines of packed_attention, one for each kind of device. They are not differentiable; packed_attention
// adds autograd.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kiln::ops {

// kFlash, kCudnn and kMemoryEfficient are ATen's kernels on CUDA: flash attention (Dao 2023), cuDNN's and the
// memory-efficient ones.
enum class AttentionEngine : int64_t { kNone, kCpu, kFlash, kCudnn, kMemoryEfficient };

// The results of forward that backward needs.
struct AttentionResult {
  at::Tensor out;           // (B, N, H * d) contiguous, dtype of qkv
  at::Tensor log_sum;       // log (log2 with SIMD) of the softmax sums; (B, H, N) or the engine's layout
  at::Tensor seed, offset;  // random state that ATen's CUDA kernels want back, or undefined; no dropout here
};

// Gradients of q, k and v: packed like qkv or, where `packed` is undefined, each (B, H, N, d) in the strides
// that its kernel left.
struct AttentionGrads {
  at::Tensor packed;
  at::Tensor q, k, v;
};

// What backward takes over from forward.
struct AttentionPass {
  double scale;
  AttentionEngine engine;
  // A GPU's kernels write the gradients of q, k and v into packed memory where they can: cuDNN by a graph of
  // its own, the memory-efficient ones by themselves.
  bool packs = false;
};

// Returns q, k or v (`which` 0, 1 or 2) of qkv (B, N, 3, H, d) as a view (B, H, N, d).
inline at::Tensor attention_heads(const at::Tensor& qkv, int64_t which) {
  return qkv.select(2, which).transpose(1, 2);
}

// The arguments of ragged_attention.
struct AttentionRows {
  at::Tensor q, k, v;
  std::vector<int64_t> offsets;
  double scale;
};

namespace cpu {
// Returns kCpu for f32, bf16 and fp16, else kNone.
AttentionEngine attention_engine(const at::Tensor& qkv, double scale);
// Returns the dtype that is computed in. fp16 is storage only, and so is bf16 without bf16 instructions.
at::ScalarType attention_dtype(const at::Tensor& qkv);
// Requires a contiguous qkv.
AttentionResult attention(const at::Tensor& qkv, double scale, AttentionEngine engine);
// grad_out has the shape of result.out and is contiguous.
AttentionGrads attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                  const AttentionResult& result, const AttentionPass& pass);
// `out` and `grad_out` are (B, N, H, d), contiguous; gradients are shaped like q, k and v.
AttentionResult ragged_attention(const AttentionRows& rows);
AttentionGrads ragged_attention_backward(const at::Tensor& grad_out, const AttentionRows& rows,
                                         const AttentionResult& result);
// fused_attention, forward alone, of what serves_fused() is true for.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& mask, std::optional<double> scale);
bool serves_fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const std::optional<at::Tensor>& mask);
}  // namespace cpu

namespace cuda {
// Returns the engine that ATen would use on this GPU for a training step, or kNone where it has no fused
// kernel. The answer does not depend on whether a gradient is wanted now, so a recomputed forward gives the
// same bits. Keep it for backward: it follows settings that may change in between.
AttentionEngine attention_engine(const at::Tensor& qkv, double scale);
AttentionEngine engine_of_backend(int64_t backend);  // an at::SDPBackend
// Returns the names of the engines that attention_engine() has answered in this process, in fixed order.
std::vector<std::string> engines_used();
AttentionResult attention(const at::Tensor& qkv, double scale, AttentionEngine engine);
AttentionGrads attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                  const AttentionResult& result, const AttentionPass& pass);

// Attention by cuDNN, through ATen. On Hopper its kernels are faster than flash attention's, and they take
// head widths that are not a multiple of 32 without padding.
//
// qkv (B, N, 3, H, d) is bf16 or fp16, and d a multiple of 8. Throws c10::Error where cuDNN has no engine for
// it; ask at::_fused_sdp_choice first.
AttentionResult cudnn_attention(const at::Tensor& qkv, double scale);

AttentionGrads cudnn_attention_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                        const AttentionResult& result, double scale);
// By cuDNN as well, into packed memory. Returns an undefined tensor where cuDNN has no such kernel, and in
// builds without kernels.
at::Tensor cudnn_packed_backward(const at::Tensor& grad_out, const at::Tensor& qkv,
                                 const AttentionResult& result, double scale);

// Packs the three gradients into (B, N, 3, H, d), by one kernel where the build has it.
at::Tensor packed(const AttentionGrads& grads);

}  // namespace cuda

}  // namespace kiln::ops
