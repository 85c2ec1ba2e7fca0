// What the CPU and the CUDA kernels are given: plain pointers, without torch. Element types are f32, bf16 or
// fp16.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace kiln::ops {

// Rows of `width` elements, `rows_per_batch` of them for each row of shift and scale, which lie
// `shift_stride` and `scale_stride` elements apart.
struct AdalnArgs {
  const void* x;
  Dtype x_dtype;
  const void* shift;
  const void* scale;
  Dtype modulation_dtype;
  size_t shift_stride, scale_stride;
  size_t rows_per_batch, width;
  float eps;
  float* mean;  // (rows): written by forward, read by backward
  float* rstd;
};

// out = x + gate * y; gate as shift and scale above. y null: no such branch is added.
struct GatedResidualArgs {
  const void* gate;
  Dtype gate_dtype;
  size_t gate_stride;
  const void* y;
  Dtype y_dtype;
  size_t rows_per_batch, width;
};

// Gradients of adaLN and of the gated residual before it, all dense. Those of results are read.
struct AdalnGrads {
  const void* out;     // of the norm's result
  const void* around;  // of the norm's input, by whoever else reads it; null: nobody
  void* x;             // of x_in, in its dtype
  void *shift, *scale;
  void *y, *gate;  // null without a branch
};

// Products of a linear layer with an epilogue. Row-major and dense, one dtype throughout; M rows.
enum class EpilogueProduct {
  kAffineGelu,  // hidden = left (M, in) @ right (out, in)^T + bias (out); result (M, out) = gelu_tanh(hidden)
  kGradRowsGelu,  // result (M, in) = left (M, out) @ right (out, in) * gelu_tanh'(hidden); bias (in): its sum
  kGradWeight,    // result (out, in) = left (M, out)^T @ right (M, in); bias (out): the sum of left's rows
};
struct EpilogueProductArgs {
  EpilogueProduct product;
  Dtype dtype;
  size_t rows, out_features, in_features;
  const void *left, *right;
  void* result;
  void* bias;    // read by kAffineGelu, written by the others
  void* hidden;  // like result: written by kAffineGelu, read by kGradRowsGelu, null for kGradWeight
};

// Gradients of q, k and v (B, H, N, d), each of strides of its own (elements) but the last, which is 1.
struct HeadGrads {
  const void* data[3];
  size_t batch_stride[3], head_stride[3], token_stride[3];
};

// Flat memory; elements at one index belong together.
struct AdamwElements {
  float* master;
  const void* grad;
  Dtype grad_dtype;
  float* exp_avg;
  float* exp_avg_sq;
  void* compute_weights;  // or null
  Dtype compute_dtype;
  float* const* emas;
  const float* ema_steps;  // 1 - decay
  size_t num_emas;
  const float*
      device_scale;  // CUDA: on the device, multiplies in place of grad_scale; NaN moves nothing. Or null
};

struct AdamwFactors {
  float grad_scale;
  float keep;                  // 1 - lr * weight_decay
  float step_beta1;            // 1 - beta1
  float beta2, step_beta2;     // step_beta2: 1 - beta2
  float step_size;             // lr / (1 - beta1^t)
  float inv_sqrt_correction2;  // 1 / sqrt(1 - beta2^t)
  float eps;
};

}  // namespace kiln::ops
