// The fused operations. Each has a composed ATen reference (namespace ops::reference: the oracle of tests and
// the fallback everywhere), autograd, a Meta path and, where it pays, CPU and CUDA kernels. Nothing here
// knows a model.
//
// Mixed precision follows torch.autocast: matrix products and attention in the compute dtype (bf16/fp16),
// norms, softmax and accumulation in f32, the residual stream in the dtype it comes in (f32). fp16 on a CPU
// is storage only: the products run in f32.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace kiln::ops {

// x (..., in) @ weight (out, in)^T + bias (out). x and the weight are cast to `compute_dtype`, the result
// stays in it. The gradient of weight and bias has their own dtype.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype);

// linear(gelu_tanh(h), weight, bias) that saves h alone: gelu is recomputed in backward. h (..., in) in
// compute dtype.
at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype);

// Rows of `table` (rows, D) by `ids` (...) i64 -> (..., D), f32 (f64 for an f64 table). The gradient is
// dense: summed in f32, then in the table's dtype.
at::Tensor embedding_rows(const at::Tensor& table, const at::Tensor& ids);

// LayerNorm without affine, then * (1 + scale) + shift (adaLN, Peebles & Xie 2023, eq. in sec. 3.2).
// x (B, N, D) f32 or low precision; shift, scale (B, D), any strides with unit last; result in `out_dtype`.
at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype);

// x + gate[:, None, :] * y. x (B, N, D) residual dtype (the result's too), gate (B, D), y (B, N, D) compute
// dtype.
at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y);

// softmax(q k^T * scale) v from the packed projection. qkv (B, N, 3, H, d) contiguous -> (B, N, H * d).
// Gradient arrives packed, without a concatenation.
at::Tensor packed_attention(const at::Tensor& qkv, double scale);

// GroupNorm with affine, then SiLU when `silu`. x (B, C, H, W) contiguous or channels-last (kept). Statistics
// in f32.
at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu);

// One fused pass over flat memory: unscale, clip, decoupled-decay AdamW (Loshchilov & Hutter 2019), EMAs,
// cast. All 1-D of the same length n. Elementwise, so any slice (a ZeRO shard) gives the same bits.
struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;       // 1-based, for bias correction
  double grad_scale;  // gradient is multiplied by this first: 1 / loss_scale * clip coefficient
};
struct EmaSlice {
  at::Tensor weights;  // (n) f32, updated as d * e + (1 - d) * master
  double decay;
};
void adamw_ema_step_(at::Tensor& master,                           // (n) f32
                     const at::Tensor& grad,                       // (n) f32, bf16 or fp16
                     at::Tensor& exp_avg, at::Tensor& exp_avg_sq,  // (n) f32
                     std::vector<EmaSlice>& emas,
                     at::Tensor* compute_weights,  // (n) bf16/fp16 copy to refresh, or null
                     const AdamWStep& options);

// Sum of squares in f64 of a flat gradient (f32, bf16, fp16), as a 0-d f64 tensor on its device; inf/nan
// propagate.
at::Tensor sum_of_squares(const at::Tensor& flat);

namespace reference {
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype);
at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype);
at::Tensor embedding_rows(const at::Tensor& table, const at::Tensor& ids);
at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype);
at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y);
at::Tensor packed_attention(const at::Tensor& qkv, double scale);
at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu);
void adamw_ema_step_(at::Tensor& master, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                     std::vector<EmaSlice>& emas, at::Tensor* compute_weights, const AdamWStep& options);
}  // namespace reference

}  // namespace kiln::ops
