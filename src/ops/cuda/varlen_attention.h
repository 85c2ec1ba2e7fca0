// Attention of every sample's queries to the sample's own number of rows, on a GPU in one call.
// ragged_attention and cross_attention use it there.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention.h"

namespace kiln::ops {

// The samples' tokens one after another: q (B * N, H, d) with N queries of each sample; k, v (T, H, d), unit
// stride last. Sample b has rows [k_offsets[b], k_offsets[b + 1]).
struct VarlenTokens {
  at::Tensor q, k, v;
  at::Tensor q_offsets, k_offsets;  // (B + 1) i32, on the device
  int64_t num_queries;              // N
  int64_t most_rows;                // largest number of rows of a sample; at least 1
  double scale;
};

// softmax(q k^T * scale) v, of one dtype, on CUDA or on meta in a dry run of CUDA. Other arguments are those
// of ragged_attention. `device_offsets` is `offsets` as (B + 1) i32 on the device of q; if it is undefined,
// `offsets` is copied there and the host waits. `engine` comes from varlen_engine() and is not kNone.
// -> (B, N, H * d).
at::Tensor varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                            double scale, AttentionEngine engine);

// Returns the (num_samples + 1) i32 offsets of samples with `each` rows, at least one. They are made on the
// device.
at::Tensor even_offsets(int64_t num_samples, int64_t each, at::Device device);

// Returns the engine that a GPU of this compute capability (80 for 8.0) uses: flash attention in bf16 and
// fp16 from 8.0 on, the memory-efficient kernels in f32 and on older GPUs. kNone if neither takes heads of
// this width or dtype.
AttentionEngine varlen_engine(at::ScalarType dtype, int64_t head_dim, int64_t capability);

struct VarlenGrads {
  at::Tensor q, k, v;  // contiguous, shaped like the tokens
};

namespace cuda {
// The outputs of samples without rows are undefined, and so are the gradients of rows that no sample has.
AttentionResult varlen_attention(const VarlenTokens& tokens, AttentionEngine engine);
VarlenGrads varlen_attention_backward(const at::Tensor& grad_out, const VarlenTokens& tokens,
                                      const AttentionResult& result, AttentionEngine engine);
}  // namespace cuda

}  // namespace kiln::ops
