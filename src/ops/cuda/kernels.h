// CUDA kernels behind a plain C interface, without torch. Each call enqueues on `stream` (a cudaStream_t) and
// returns a cudaError_t, 0 for success. Element types are f32, bf16 and fp16. Arithmetic is f32, and every
// reduction has a fixed order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops/kernel_args.h"

extern "C" {

// Writes one line about an error that one of these functions returned on the current device.
void kiln_cuda_error_text(int error, char* text, size_t size);

// Returns the compute capability of the current device, 90 for 9.0, or 0 if there is none.
int kiln_cuda_capability(void);

int kiln_cuda_gelu_tanh(kiln::Dtype dtype, const void* in, void* out, size_t n, void* stream);
int kiln_cuda_gelu_tanh_grad(kiln::Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n,
                             void* stream);

// The widest row of the kernels that keep a whole row in a block.
enum { kWidestRow = 4096 };

// If branch->y is null, the norm reads x_in, and x_out is not touched. Otherwise x_out becomes x_in + gate *
// y, and the norm reads that. y has out's dtype. args->x is not read.
int kiln_cuda_adaln(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                    const void* x_in, void* x_out, void* out, kiln::Dtype out_dtype, size_t batch,
                    void* stream);

// args->x is the input of the norm. `partials` is (2, batch, P, width) f32 of scratch, or (3, ...) with a
// branch; P = ceil(rows_per_batch / rows_per_partial). grads->out and grads->y have `low_dtype`. The
// gradients of shift, scale and gate have the dtypes of these.
int kiln_cuda_adaln_grad(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                         const kiln::ops::AdalnGrads* grads, kiln::Dtype low_dtype, float* partials,
                         size_t rows_per_partial, size_t batch, void* stream);

int kiln_cuda_gated_residual(const kiln::ops::GatedResidualArgs* args, const void* x, void* out,
                             kiln::Dtype x_dtype, size_t batch, void* stream);

// `partials` is (batch, P, width) f32 of scratch.
int kiln_cuda_gated_residual_grad(const kiln::ops::GatedResidualArgs* args, const void* grad,
                                  kiln::Dtype grad_dtype, void* dy, void* dgate, float* partials,
                                  size_t rows_per_partial, size_t batch, void* stream);

// `partials` is (2, batch, P, groups) f32 of scratch. At most kWidestRow channels.
int kiln_cuda_group_norm(const kiln::ops::GroupNormArgs* args, void* out, float* partials, size_t batch,
                         void* stream);
int kiln_cuda_group_norm_grad(const kiln::ops::GroupNormArgs* args, const kiln::ops::GroupNormGradArgs* grads,
                              size_t batch, void* stream);

// Writes packed (B, N, 3, H, d) from the gradients of q, k and v, in one pass.
int kiln_cuda_pack_heads(const kiln::ops::HeadGrads* grads, kiln::Dtype dtype, void* packed, size_t batch,
                         size_t num_tokens, size_t num_heads, size_t head_dim, void* stream);

// Backward of attention by cuDNN. The first finds the bytes of scratch that the second takes for that shape;
// both return kAttentionNotServed, and do nothing, if cuDNN has no such kernel for this GPU.
enum { kAttentionNotServed = -1 };
int kiln_cuda_attention_grads_scratch(const kiln::ops::AttentionGradsArgs* args, size_t* bytes);
int kiln_cuda_attention_grads(const kiln::ops::AttentionGradsArgs* args, void* scratch, void* stream);

// Accumulates in f32. Returns kEpilogueNotServed, and does nothing, if cuBLASLt has no such product for this
// GPU, shape or alignment.
enum { kEpilogueNotServed = -1 };
int kiln_cuda_epilogue_product(const kiln::ops::EpilogueProductArgs* args, void* workspace,
                               size_t workspace_bytes, void* stream);
// Takes the nth of the algorithms that cuBLASLt proposes for a shape, from 0, its best guess, which is taken
// unless this was called, to kEpilogueAlgorithms - 1. kFastestAlgorithm: all are timed at the first product
// of a shape, which leaves its result as one product does, and the fastest is taken from then on.
enum { kEpilogueAlgorithms = 8, kFastestAlgorithm = -1 };
void kiln_cuda_take_epilogue_algorithm(int nth);
// Takes a choice that was made before, on the same kind of GPU and version, instead of timing its shape.
void kiln_cuda_set_product_choice(const kiln::ops::ProductChoice* choice);
// Writes up to `most` of the current device's choices, those that were set among them. Returns their number.
size_t kiln_cuda_product_choices(kiln::ops::ProductChoice* choices, size_t most);
size_t kiln_cuda_cublaslt_version(void);
// How often this process asked for a product and was served, and how often not.
void kiln_cuda_epilogue_counts(kiln::ops::EpilogueProduct product, int64_t* served, int64_t* refused);

// Writes to *scale the power of two by which the values are divided to be at most `format_largest`.
// `partials` is scratch of kFp8Partials elements. All memory is on the device.
enum { kFp8Partials = 1024 };
int kiln_cuda_fp8_scale(kiln::Dtype dtype, const void* values, size_t n, float format_largest,
                        unsigned* partials, float* scale, void* stream);
// Writes values (num_rows, num_columns) / *scale as e4m3 or e5m2: in the same layout to `rows`, transposed to
// `columns`. Either may be null. Both extents are multiples of 16, and all memory is aligned to 16 bytes.
int kiln_cuda_fp8_convert(kiln::Dtype dtype, const void* values, size_t num_rows, size_t num_columns,
                          const float* scale, bool is_e5m2, void* rows, void* columns, void* stream);

// scale[0] = min(1, max_norm / (norm + 1e-6)) / loss_scale with norm = sqrt(*sum_of_squares) / loss_scale.
// Without a limit (max_norm 0) it is 1 / loss_scale. It is NaN unless the norm and all of `losses` are
// finite. All memory is on the device; `losses` may be null.
int kiln_cuda_step_scale(const double* sum_of_squares, const double* losses, size_t num_losses,
                         double max_norm, double loss_scale, float* scale, void* stream);

// The pointers of `elements` are on the device. Its arrays `emas` and `ema_steps` are on the host.
int kiln_cuda_adamw(const kiln::ops::AdamwElements* elements, const kiln::ops::AdamwFactors* factors,
                    size_t n, void* stream);

// Rounds f32 to bf16 with the draws of core/philox.h for `seed`, `draw`, `index` and the position in the
// unit. values[0] has position `first`; the last position is below 2^35.
int kiln_cuda_stochastic_round(const float* values, void* rounded, size_t n, uint64_t first, uint64_t seed,
                               uint32_t draw, uint64_t index, void* stream);

// `partials` is scratch of kSumOfSquaresPartials doubles, `sum` one double. Both are on the device.
enum { kSumOfSquaresPartials = 1024 };
int kiln_cuda_sum_of_squares(kiln::Dtype dtype, const void* values, size_t n, double* partials, double* sum,
                             void* stream);
}
