// The arguments of the CPU and CUDA kernels, as plain pointers and without torch. Element types are f32, bf16
// or fp16.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace kiln::ops {

// Rows of `width` elements. Each row of shift and scale serves `rows_per_batch` of them; rows of shift are
// `shift_stride` elements apart, rows of scale `scale_stride`.
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

// out = x + gate * y. The gate has one row per batch, like shift and scale above. A null y means that no
// branch is added.
struct GatedResidualArgs {
  const void* gate;
  Dtype gate_dtype;
  size_t gate_stride;
  const void* y;
  Dtype y_dtype;
  size_t rows_per_batch, width;
};

// Gradients of adaLN and of the gated residual before it, all dense. The kernel reads `out` and `around` and
// writes the others.
struct AdalnGrads {
  const void* out;     // of the norm's result
  const void* around;  // of the norm's input, from its other readers; null if there are none
  void* x;             // of x_in, in its dtype
  void *shift, *scale;
  void *y, *gate;  // null without a branch
};

// GroupNorm, then SiLU if `silu`, of channels-last pictures (B, pixels, channels). A block takes
// `pixels_per_block` pixels, so the P = ceil(pixels / pixels_per_block) partial sums of a picture have a
// fixed order.
struct GroupNormArgs {
  const void* x;
  Dtype dtype;
  const void *weight, *bias;  // (channels)
  Dtype affine_dtype;
  size_t num_groups, channels, pixels, pixels_per_block;
  float eps;
  bool silu;
  float *mean, *rstd;  // (B, groups): written by forward, read by backward
};

// The kernel reads `out` and writes the others.
struct GroupNormGradArgs {
  const void* out;      // of the result
  void* x;              // in its dtype
  void *weight, *bias;  // both or neither
  float* partials;      // scratch (2, B, P, channels)
  float* channel_sums;  // scratch (2, B, channels)
  float* group_means;   // scratch (2, B, groups)
};

// A picture of 64 pixels or more has at least 16 blocks, so a batch of 8 has work for 128 of an H100's 132
// multiprocessors.
constexpr size_t group_norm_pixels_per_block(size_t pixels) {
  return pixels <= 64 ? 4 : pixels >= 512 ? 32 : pixels / 16;
}

// Products of a linear layer, most of them with an epilogue. All matrices are row-major, dense and of one
// dtype; there are M rows.
enum class EpilogueProduct {
  kAffineGelu,  // hidden = left (M, in) @ right (out, in)^T + bias (out); result (M, out) = gelu_tanh(hidden)
  kGradRowsGelu,  // result (M, in) = left (M, out) @ right (out, in) * gelu_tanh'(hidden); bias (in): its sum
  kGradWeight,    // result (out, in) = left (M, out)^T @ right (M, in); bias (out): the sum of left's rows
  kAffine,        // result (M, out) = left (M, in) @ right (out, in)^T + bias (out), or without a bias
  kGradRows,      // result (M, in) = left (M, out) @ right (out, in)
};
inline constexpr int kNumEpilogueProducts = 5;
inline constexpr const char* kEpilogueProductNames[kNumEpilogueProducts] = {
    "affine_gelu", "grad_rows_gelu", "grad_weight", "affine", "grad_rows"};
struct EpilogueProductArgs {
  EpilogueProduct product;
  Dtype dtype;
  size_t rows, out_features, in_features;
  const void *left, *right;
  void* result;
  void* bias;    // read by kAffineGelu and kAffine, written by the others; null for kGradRows
  void* hidden;  // like result: written by kAffineGelu, read by kGradRowsGelu, null for the others
};

// The algorithm that was the fastest for products of a shape, in column-major extents. cuBLASLt's own
// description of it holds for one kind of GPU and one version of the library.
struct ProductChoice {
  EpilogueProduct product;
  Dtype dtype;
  bool has_bias;
  size_t m, n, k;
  int alignments[3];  // of right, left and result, in bytes
  size_t workspace_bytes;
  uint64_t algorithm[8];
  float microseconds, first_microseconds;  // of it, and of the algorithm that cuBLASLt proposed first
};

// Gradients of q, k and v (B, H, N, d). Each has its own strides in elements; the last one is 1.
struct HeadGrads {
  const void* data[3];
  size_t batch_stride[3], head_stride[3], token_stride[3];
};

// Backward of attention on a packed projection, all dense: bf16 or fp16, head_dim a multiple of 8.
struct AttentionGradsArgs {
  Dtype dtype;
  size_t batch, num_tokens, num_heads, head_dim;
  const void* qkv;             // (B, N, 3, H, d)
  const void *out, *grad_out;  // (B, N, H, d)
  const float* log_sum;        // (B, H, N), natural logarithms of the softmax sums
  float scale;
  void* grad_qkv;  // like qkv
};

// Updates of at least this many elements write the compute weights around the caches. Fewer stay in the
// caches for the next forward.
inline constexpr int64_t kStreamedElements = int64_t{1} << 20;

// Flat memory. Elements at one index belong together.
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
  const float* device_scale;  // null, or on a CUDA device: replaces grad_scale, and NaN moves nothing
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

struct AdamWStep;  // ops/ops.h
AdamwFactors step_factors(const AdamWStep& options);

}  // namespace kiln::ops
