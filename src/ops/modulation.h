// Shared by adaln_modulate and gated_residual: (B, D) modulation rows against (B, N, D) tokens.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/kernel_args.h"

namespace kiln::ops {

// Rows per partial sum of a reduction over N. They are fixed, so results do not depend on the thread count. A
// GPU takes fewer, as each is a block: a batch of 8 with 256 tokens then has work for 128 of an H100's 132
// multiprocessors.
inline constexpr int64_t kRowsPerPartial = 32, kRowsPerPartialOnGpu = 16;

// Returns memory for f32 partial sums (leading..., P, D) over the N rows of x (B, N, D).
at::Tensor partial_sums(std::vector<int64_t> leading, const at::Tensor& x);

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
