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

// out = x + gate * y; gate as shift and scale above.
struct GatedResidualArgs {
  const void* gate;
  Dtype gate_dtype;
  size_t gate_stride;
  const void* y;
  Dtype y_dtype;
  size_t rows_per_batch, width;
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
