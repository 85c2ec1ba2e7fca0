// Beside ragged_attention: its way for many rows, for captions whose offsets a GPU has, and attention where
// every sample has equally many rows.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace kiln::ops {

// Rows (T, H, d) of sample b as (1, H, L, d), a view.
inline at::Tensor sample_rows(const at::Tensor& rows, const std::vector<int64_t>& offsets, int64_t b) {
  return rows.narrow(0, offsets[b], offsets[b + 1] - offsets[b]).unsqueeze(0).transpose(1, 2);
}

// Tokens (B, N, H, d) of sample b as (1, H, N, d), a view.
inline at::Tensor sample_tokens(const at::Tensor& tokens, int64_t b) {
  return tokens.narrow(0, b, 1).transpose(1, 2);
}

// Zeroes the rows that no sample has, before the first and after the last.
void zero_unowned(const at::Tensor& rows, const std::vector<int64_t>& offsets);

// Whether ATen's flash attention, sample by sample, beats the kernels of ragged_attention: in bf16 it uses
// the processor's matrix instructions, which pays from some hundred rows on.
bool prefers_long_attention(const at::Tensor& q, const std::vector<int64_t>& offsets);

// ragged_attention with its offsets on the device of q as well, (B + 1) i32: a GPU's kernels read them there,
// and nothing waits for a copy. Where they are undefined they are copied.
at::Tensor caption_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                             double scale);

// The tensor, copied only if a head's elements are strided. All else may be (a part of a packed projection
// is).
at::Tensor unit_last(const at::Tensor& tensor);

// softmax(q k^T * scale) v where every sample has as many rows: q (B, N, H, d); k, v (B, L, H, d),
// contiguous.
// -> (B, N, H * d).
at::Tensor cross_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

// ragged_attention on a CPU by ATen's flash attention.
at::Tensor long_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::vector<int64_t>& offsets, double scale);

}  // namespace kiln::ops
