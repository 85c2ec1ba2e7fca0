// ATen's attention that never holds the scores of all pairs of tokens, with its path in a dry run.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace kiln::nn {

// softmax(q k^T * scale + mask) v -> (B, H, N, d). q (B, H, N, d), k and v (B, H, M, d). `mask` (B, H, N, M)
// is added, or undefined. The scale is 1 / sqrt(d) if none is given.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask = {}, std::optional<double> scale = {});

}  // namespace kiln::nn
