// Relatives of ragged_attention: captions whose offsets are on a GPU, and attention where every sample has
// equally many rows.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace kiln::ops {

// Returns the rows of sample b, out of rows (T, H, d), as a view (1, H, L, d).
inline at::Tensor sample_rows(const at::Tensor& rows, const std::vector<int64_t>& offsets, int64_t b) {
  return rows.narrow(0, offsets[b], offsets[b + 1] - offsets[b]).unsqueeze(0).transpose(1, 2);
}

// Returns the tokens of sample b, out of tokens (B, N, H, d), as a view (1, H, N, d).
inline at::Tensor sample_tokens(const at::Tensor& tokens, int64_t b) {
  return tokens.narrow(0, b, 1).transpose(1, 2);
}

// Zeroes the rows that belong to no sample: those before the first offset and after the last.
void zero_unowned(const at::Tensor& rows, const std::vector<int64_t>& offsets);

// ragged_attention with its offsets also on the device of q, (B + 1) i32. A GPU's kernels read them there,
// and nothing waits for a copy. Undefined `device_offsets` are copied from `offsets`.
at::Tensor caption_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                             double scale);

// Returns the tensor, or a copy if the elements of a head are strided. The other dimensions may be strided,
// as in a part of a packed projection.
at::Tensor unit_last(const at::Tensor& tensor);

// softmax(q k^T * scale) v where every sample has equally many rows. q (B, N, H, d); k, v (B, L, H, d),
// contiguous. -> (B, N, H * d).
at::Tensor cross_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

}  // namespace kiln::ops
