// CUDA kernels behind a plain C interface, without torch. Each call enqueues on `stream` (a cudaStream_t) and
// returns a cudaError_t, 0 for success. Element types f32, bf16 and fp16; arithmetic in f32; every reduction
// in fixed order.
#pragma once
#include <cstddef>

#include "ops/kernel_args.h"

extern "C" {

// What an error that one of these returned means, on the current device: one line.
void kiln_cuda_error_text(int error, char* text, size_t size);

int kiln_cuda_gelu_tanh(kiln::Dtype dtype, const void* in, void* out, size_t n, void* stream);
int kiln_cuda_gelu_tanh_grad(kiln::Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n,
                             void* stream);

int kiln_cuda_adaln(const kiln::ops::AdalnArgs* args, void* out, kiln::Dtype out_dtype, size_t rows,
                    void* stream);

// `partials`: (2, batch, P, width) f32 of scratch, P = ceil(rows_per_batch / rows_per_partial). dshift and
// dscale are (batch, width), dense, of the modulation's dtype.
int kiln_cuda_adaln_grad(const kiln::ops::AdalnArgs* args, const void* grad, kiln::Dtype grad_dtype, void* dx,
                         void* dshift, void* dscale, float* partials, size_t rows_per_partial, size_t batch,
                         void* stream);

int kiln_cuda_gated_residual(const kiln::ops::GatedResidualArgs* args, const void* x, void* out,
                             kiln::Dtype x_dtype, size_t rows, void* stream);

// `partials`: (batch, P, width) f32 of scratch.
int kiln_cuda_gated_residual_grad(const kiln::ops::GatedResidualArgs* args, const void* grad,
                                  kiln::Dtype grad_dtype, void* dy, void* dgate, float* partials,
                                  size_t rows_per_partial, size_t batch, void* stream);

// The pointers of `elements` are on the device, its arrays `emas` and `ema_steps` on the host.
int kiln_cuda_adamw(const kiln::ops::AdamwElements* elements, const kiln::ops::AdamwFactors* factors,
                    size_t n, void* stream);

// `partials`: kSumOfSquaresPartials doubles of scratch; `sum`: one double. Both on the device.
enum { kSumOfSquaresPartials = 1024 };
int kiln_cuda_sum_of_squares(kiln::Dtype dtype, const void* values, size_t n, double* partials, double* sum,
                             void* stream);
}
