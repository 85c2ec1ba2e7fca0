// CPU kernels in plain pointers, without torch. Each handles a range of its work, so that the caller chooses
// the threads; no result depends on how the work is split. Element types: f32, bf16, fp16; arithmetic is f32.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/kernel_args.h"

namespace kiln::ops::cpu {

// Elements [0, n): out = gelu_tanh(in), of one dtype.
void gelu_tanh(Dtype dtype, const void* in, void* out, size_t n);

// Elements [0, n): grad_in = grad * gelu_tanh'(in), of one dtype; grad_in may be grad.
void gelu_tanh_grad(Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n);

// out of rows [row_begin, row_end).
void adaln(const AdalnArgs& args, void* out, Dtype out_dtype, size_t row_begin, size_t row_end);

// dx of rows [row_begin, row_end), all of one batch, and the sums of d shift and d scale over these rows
// (width each). `around`: a gradient of x's dtype that is added to dx, or null.
void adaln_grad(const AdalnArgs& args, const void* grad, Dtype grad_dtype, const void* around, void* dx,
                float* dshift, float* dscale, size_t row_begin, size_t row_end);

// out of rows [row_begin, row_end); x and out are of one dtype.
void gated_residual(const GatedResidualArgs& args, const void* x, void* out, Dtype x_dtype, size_t row_begin,
                    size_t row_end);

// dy of rows [row_begin, row_end), all of one batch, and the sum of d gate over these rows (width).
void gated_residual_grad(const GatedResidualArgs& args, const void* grad, Dtype grad_dtype, void* dy,
                         float* dgate, size_t row_begin, size_t row_end);

// out[j] = sum over c of partials[c * stride + j], in order of c.
void sum_partials(const float* partials, size_t count, size_t stride, void* out, Dtype out_dtype,
                  size_t width);

// Elements [begin, end).
void adamw(const AdamwElements& elements, const AdamwFactors& factors, size_t begin, size_t end);

// Sum of squares of n elements in f64, by 16 interleaved sums whatever the instruction set.
double sum_of_squares(Dtype dtype, const void* values, size_t n);

// GroupNorm over one (batch, group) of a contiguous tensor: `channels` rows of `pixels` elements each.
void group_norm_contiguous(const void* x, void* out, Dtype dtype, const float* weight, const float* bias,
                           float eps, bool silu, size_t channels, size_t pixels);

// Channels-last: mean and sum of squared deviations of every channel over `pixels` pixels of `channels`
// elements.
void channel_moments(const void* x, Dtype dtype, double* mean, double* m2, size_t channels, size_t pixels);

// Channels-last: out = act(x * factor[c] + offset[c]).
void channel_affine(const void* x, void* out, Dtype dtype, const float* factor, const float* offset,
                    bool silu, size_t channels, size_t pixels);

}  // namespace kiln::ops::cpu
