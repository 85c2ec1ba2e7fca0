// Shared by adaln_modulate and gated_residual: (B, D) modulation rows against (B, N, D) tokens.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/kernel_args.h"

namespace kiln::ops {

// Rows per partial sum of a reduction over N. It is fixed, so results do not depend on the thread count.
inline constexpr int64_t kRowsPerPartial = 32;

// Throws unless x is (B, N, D), and `rows` (B, D).
void check_modulation(const char* who, const char* name, const at::Tensor& x, const at::Tensor& rows);

// Returns `rows` itself if its last dimension has unit stride (as in a chunk of (B, 6D)), else a copy.
at::Tensor unit_stride_rows(const at::Tensor& rows);

// sums (B, D) = partials (B, P, D) f32, summed over P in order. Both are contiguous and on the CPU.
void sum_partials(const at::Tensor& partials, const at::Tensor& sums);

// Returns the arguments of the kernels. `gate` must have unit stride in its rows, and y must be contiguous.
GatedResidualArgs gated_residual_args(const at::Tensor& gate, const at::Tensor& y);

// Throws unless x is (B, N, D), gate (B, D) and y like x.
void check_gated_residual(const char* who, const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y);

}  // namespace kiln::ops
