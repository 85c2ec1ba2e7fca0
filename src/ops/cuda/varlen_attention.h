// Attention of every sample's queries to rows of its own number, on a GPU in one call: what ragged_attention
// and cross_attention do there.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention.h"

namespace kiln::ops {

// Samples' tokens one after another: q (B * N, H, d) with N of each; k, v (T, H, d), unit stride last. Sample
// b has rows [k_offsets[b], k_offsets[b + 1]).
struct VarlenTokens {
  at::Tensor q, k, v;
  at::Tensor q_offsets, k_offsets;  // (B + 1) i32, on the device
  int64_t num_queries;              // N
  int64_t most_rows;                // of a sample; at least 1
  double scale;
};

// softmax(q k^T * scale) v; other arguments as ragged_attention has them, one dtype on CUDA, or on meta in a
// dry run of CUDA. `device_offsets`: `offsets` as (B + 1) i32 on the device of q; where it is undefined it is
// copied there, for which the host waits. `engine`: what varlen_engine() says, not kNone. -> (B, N, H * d).
at::Tensor varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                            double scale, AttentionEngine engine);

// (num_samples + 1) i32 where every sample has as many rows, at least one; made on the device.
at::Tensor even_offsets(int64_t num_samples, int64_t each, at::Device device);

// What a GPU of this compute capability (80 for 8.0) runs it with: flash attention in bf16 and fp16 from 8.0
// on, the memory-efficient kernels in f32 and before. kNone where neither takes heads of this width or dtype.
AttentionEngine varlen_engine(at::ScalarType dtype, int64_t head_dim, int64_t capability);

namespace cuda {
// What the samples without rows get is undefined, as are the gradients of rows that no sample has.
AttentionResult varlen_attention(const VarlenTokens& tokens, AttentionEngine engine);
struct VarlenGrads {
  at::Tensor q, k, v;  // like the tokens, contiguous
};
VarlenGrads varlen_attention_backward(const at::Tensor& grad_out, const VarlenTokens& tokens,
                                      const AttentionResult& result, AttentionEngine engine);
}  // namespace cuda

}  // namespace kiln::ops
