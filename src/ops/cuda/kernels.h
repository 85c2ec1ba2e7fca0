// CUDA kernels behind a plain C interface, without torch. Each call enqueues on `stream` (a cudaStream_t) and
// returns a cudaError_t, 0 for success. Element types f32, bf16 and fp16; arithmetic in f32; every reduction
// in fixed order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops/kernel_args.h"

extern "C" {

// What an error that one of these returned means, on the current device: one line.
void kiln_cuda_error_text(int error, char* text, size_t size);

// Compute capability of the current device, 90 for 9.0; 0 where there is none.
int kiln_cuda_capability(void);

int kiln_cuda_gelu_tanh(kiln::Dtype dtype, const void* in, void* out, size_t n, void* stream);
int kiln_cuda_gelu_tanh_grad(kiln::Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n,
                             void* stream);

// Widest row of the kernels that have one in a block.
enum { kWidestRow = 4096 };

// With branch->y null, the norm reads x_in and x_out is not touched; else x_out = x_in + gate * y comes
// first. y has out's dtype. args->x is not read.
int kiln_cuda_adaln(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                    const void* x_in, void* x_out, void* out, kiln::Dtype out_dtype, size_t batch,
                    void* stream);

// args->x is what the norm read. `partials`: (2, batch, P, width) f32 of scratch, P = ceil(rows_per_batch /
// rows_per_partial); (3, ...) with a branch. grads->out and ->y are of `low_dtype`, the gradients of
// modulation of its own.
int kiln_cuda_adaln_grad(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                         const kiln::ops::AdalnGrads* grads, kiln::Dtype low_dtype, float* partials,
                         size_t rows_per_partial, size_t batch, void* stream);

int kiln_cuda_gated_residual(const kiln::ops::GatedResidualArgs* args, const void* x, void* out,
                             kiln::Dtype x_dtype, size_t batch, void* stream);

// `partials`: (batch, P, width) f32 of scratch.
int kiln_cuda_gated_residual_grad(const kiln::ops::GatedResidualArgs* args, const void* grad,
                                  kiln::Dtype grad_dtype, void* dy, void* dgate, float* partials,
                                  size_t rows_per_partial, size_t batch, void* stream);

// packed (B, N, 3, H, d) from the gradients of q, k and v, in one pass.
int kiln_cuda_pack_heads(const kiln::ops::HeadGrads* grads, kiln::Dtype dtype, void* packed, size_t batch,
                         size_t num_tokens, size_t num_heads, size_t head_dim, void* stream);

// Accumulates in f32. kEpilogueNotServed: cuBLASLt has no such product for this GPU, shape or alignment, and
// nothing was done.
enum { kEpilogueNotServed = -1 };
int kiln_cuda_epilogue_product(const kiln::ops::EpilogueProductArgs* args, void* workspace,
                               size_t workspace_bytes, void* stream);

// *scale: the power of two by which the values divide to `format_largest` at most. `partials`: kFp8Partials
// of scratch, on the device as all the rest.
enum { kFp8Partials = 1024 };
int kiln_cuda_fp8_scale(kiln::Dtype dtype, const void* values, size_t n, float format_largest,
                        unsigned* partials, float* scale, void* stream);
// values (num_rows, num_columns) / *scale as e4m3 or e5m2, like it in `rows`, transposed in `columns`; either
// may be null. Both extents are multiples of 16, all memory aligned for 16 bytes.
int kiln_cuda_fp8_convert(kiln::Dtype dtype, const void* values, size_t num_rows, size_t num_columns,
                          const float* scale, bool is_e5m2, void* rows, void* columns, void* stream);

// scale[0] = min(1, max_norm / (norm + 1e-6)) / loss_scale, norm = sqrt(*sum_of_squares) / loss_scale;
// without a limit (max_norm 0) 1 / loss_scale. NaN unless the norm and all of `losses` are finite. All on the
// device; `losses` may be null.
int kiln_cuda_step_scale(const double* sum_of_squares, const double* losses, size_t num_losses,
                         double max_norm, double loss_scale, float* scale, void* stream);

// The pointers of `elements` are on the device, its arrays `emas` and `ema_steps` on the host.
int kiln_cuda_adamw(const kiln::ops::AdamwElements* elements, const kiln::ops::AdamwFactors* factors,
                    size_t n, void* stream);

// f32 to bf16, with the draws of core/philox.h that `seed`, `draw`, `index` and the position in the unit
// give: values[0] has position `first`, the last one a position below 2^35.
int kiln_cuda_stochastic_round(const float* values, void* rounded, size_t n, uint64_t first, uint64_t seed,
                               uint32_t draw, uint64_t index, void* stream);

// `partials`: kSumOfSquaresPartials doubles of scratch; `sum`: one double. Both on the device.
enum { kSumOfSquaresPartials = 1024 };
int kiln_cuda_sum_of_squares(kiln::Dtype dtype, const void* values, size_t n, double* partials, double* sum,
                             void* stream);
}
