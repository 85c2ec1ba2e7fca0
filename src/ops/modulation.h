// What adaln_modulate and gated_residual share: (B, D) modulation rows against (B, N, D) tokens.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// Rows per partial sum of a reduction over N: fixed, so that results do not depend on the thread count.
inline constexpr int64_t kRowsPerPartial = 32;

// Throws unless x is (B, N, D), and `rows` (B, D).
void check_modulation(const char* who, const char* name, const at::Tensor& x, const at::Tensor& rows);

// `rows` itself when its last dimension has unit stride (a chunk of (B, 6D) has), else a copy.
at::Tensor unit_stride_rows(const at::Tensor& rows);

// sums (B, D) = sums over P, in order, of partials (B, P, D) f32. Both contiguous, on the CPU.
void sum_partials(const at::Tensor& partials, const at::Tensor& sums);

}  // namespace kiln::ops
