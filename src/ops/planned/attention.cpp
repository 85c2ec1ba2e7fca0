// Attention in dry runs: the results of the kernels and the scratch that they take.
#include <ATen/Parallel.h>

#include "core/aten.h"
#include "ops/attention.h"
#include "ops/cuda/varlen_attention.h"
#include "ops/planned/planned.h"

namespace kiln::ops::planned {
namespace {

// The scratch of ATen's attention kernels of CUDA in backward. The sizes come from ATen's source; they are
// not measured. Each function allocates and frees it.

constexpr int64_t kFlashRows = 128;  // flash attention pads a sample's tokens to a multiple of this

// Flash attention sums the gradient of q in f32 with its head dimension padded, and keeps one sum for each
// row (mha_bwd and mha_varlen_bwd, csrc/flash_attn). `rows` counts the padded rows of all samples.
void touch_flash_scratch(const at::TensorOptions& options, int64_t rows, int64_t num_heads,
                         int64_t head_dim) {
  const auto f32 = options.dtype(at::kFloat);
  const int64_t padding = head_dim <= 128 ? 32 : 64;
  const at::Tensor row_sums = at::empty({num_heads, rows}, f32);
  at::empty({rows, num_heads, at::divup(head_dim, padding) * padding}, f32);
}

// The memory-efficient kernels in f32 first multiply out by its gradient, then sum the gradient of q in tiles
// (_efficient_attention_backward; workspace_elements_gq, mem_eff_attention/kernel_backward.h).
void touch_efficient_scratch(const at::TensorOptions& options, int64_t batch, int64_t num_tokens,
                             int64_t num_heads, int64_t head_dim) {
  const auto f32 = options.dtype(at::kFloat);
  const std::vector<int64_t> sums{batch, num_heads, num_tokens};
  at::Tensor delta;
  {
    const at::Tensor product = at::empty({batch, num_tokens, num_heads, head_dim}, f32);
    const at::Tensor sum = at::empty(sums, f32);
    delta = at::empty(sums, f32);
  }
  constexpr int64_t kColumns = 64, kLock = 4;  // columns of a tile; f32 elements of its lock
  const int64_t tile_rows = head_dim <= 64 ? 64 : 128;
  const int64_t tiles = at::divup(num_tokens, tile_rows) * at::divup(head_dim, kColumns);
  at::empty({batch * num_heads * tiles * (tile_rows * kColumns + kLock)}, f32);
}

}  // namespace

AttentionResult attention_of_cuda(const at::Tensor& qkv, double, AttentionEngine) {
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  return {at::empty({batch, num_tokens, num_heads * head_dim}, qkv.options()),
          at::empty({batch, num_heads, num_tokens}, qkv.options().dtype(at::kFloat)),
          {},
          {}};
}

// Scratch is that of flash attention. cuDNN's sums of the gradient of q are no larger.
AttentionGrads attention_backward_of_cuda(const at::Tensor&, const at::Tensor& qkv, const AttentionResult&,
                                          const AttentionPass& pass) {
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  AttentionGrads grads;
  if (pass.packs)
    grads.packed = at::empty_like(qkv);
  else
    for (at::Tensor* part : {&grads.q, &grads.k, &grads.v})
      *part = at::empty({batch, num_heads, num_tokens, head_dim}, qkv.options());
  if (qkv.scalar_type() == at::kFloat)
    touch_efficient_scratch(qkv.options(), batch, num_tokens, num_heads, head_dim);
  else
    touch_flash_scratch(qkv.options(), batch * at::divup(num_tokens, kFlashRows) * kFlashRows, num_heads,
                        head_dim);
  return grads;
}

at::Tensor packed(const AttentionGrads& grads) {
  return at::empty({grads.q.size(0), grads.q.size(2), 3, grads.q.size(1), grads.q.size(3)},
                   grads.q.options());
}

AttentionResult varlen_attention(const VarlenTokens& t, AttentionEngine engine) {
  const int64_t batch = t.q_offsets.size(0) - 1, num_heads = t.q.size(1);
  const at::Tensor out = at::empty(t.q.sizes(), t.q.options());
  const auto f32 = t.q.options().dtype(at::kFloat);
  const auto random_state = t.q.options().dtype(at::kUInt64);
  if (engine == AttentionEngine::kFlash)
    return {out, at::empty({num_heads, t.q.size(0)}, f32), at::empty({2}, random_state),
            at::empty({}, random_state)};
  constexpr int64_t kPadding = 32;  // the softmax sums of a sample are padded to a multiple of this
  return {out, at::empty({batch, num_heads, at::divup(t.num_queries, kPadding) * kPadding}, f32), {}, {}};
}

VarlenGrads varlen_attention_backward(const at::Tensor&, const VarlenTokens& t, const AttentionResult&,
                                      AttentionEngine engine) {
  const int64_t batch = t.q_offsets.size(0) - 1;
  VarlenGrads grads{at::empty(t.q.sizes(), t.q.options()), at::empty(t.k.sizes(), t.k.options()),
                    at::empty(t.v.sizes(), t.v.options())};
  if (engine == AttentionEngine::kFlash)
    touch_flash_scratch(t.q.options(), t.q.size(0) + kFlashRows * batch, t.q.size(1), t.q.size(2));
  else
    touch_efficient_scratch(t.q.options(), batch, t.num_queries, t.q.size(1), t.q.size(2));
  return grads;
}

}  // namespace kiln::ops::planned
