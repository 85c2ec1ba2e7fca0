// The fused operations. Each has a composed ATen reference (namespace ops::reference: the oracle of tests and
// the fallback everywhere), autograd and, where they pay, CPU and CUDA kernels. kernels.h says what they do
// in a dry run. Nothing here knows a model.
//
// Mixed precision follows torch.autocast. Matrix products and attention run in the compute dtype (bf16 or
// fp16), norms, softmax and accumulation in f32, and the residual stream keeps its own dtype (f32). On a CPU,
// fp16 is storage only: products run in f32.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace kiln::ops {

// The number format of products: the compute dtype, or under bf16 fp8 for layers that are large enough
// (ops/fp8.h).
enum class Products { kComputeDtype, kFp8 };

// x (..., in) @ weight (out, in)^T + bias (out). x and the weight are cast to `compute_dtype`, and the result
// stays in it. Weight and bias get gradients of their own dtypes.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype, Products products = Products::kComputeDtype);

// The tanh approximation of GELU (Hendrycks & Gimpel 2016). Saves h.
at::Tensor gelu_tanh(const at::Tensor& h);

// linear(gelu_tanh(h), weight, bias) that saves h alone and recomputes gelu in backward. h (..., in) is in
// the compute dtype.
at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype);

// What a step chooses for its operations. They ask in forward; backward, which runs on threads of autograd's,
// follows its forward.
struct OpChoices {
  bool keep_gelu = false;  // gelu_tanh_mlp saves gelu's result as well
  // A GPU's attention writes the gradients of q, k and v into one packed memory where its kernels can.
  bool pack_gradients = false;
  bool time_products = false;  // in a dry run, products are the best of timed ones
  // A block hands its last branch on (State::branch), and the next one adds it in the pass of its own norm.
  bool hand_on_branch = false;
};

// While it lives, operations on this thread follow its choices.
class OpChoicesScope {
 public:
  explicit OpChoicesScope(OpChoices choices) : before_(current_) { current_ = choices; }
  ~OpChoicesScope() { current_ = before_; }
  OpChoicesScope(const OpChoicesScope&) = delete;
  static OpChoices current() { return current_; }

 private:
  static inline thread_local OpChoices current_;
  OpChoices before_;
};

// linear(gelu_tanh(linear(x, weight_1, bias_1)), weight_2, bias_2). Saves x and the input of gelu; backward
// computes gelu again unless OpChoices kept it.
struct MlpWeights {
  at::Tensor weight_1, bias_1;  // (hidden, in), (hidden)
  at::Tensor weight_2, bias_2;  // (out, hidden), (out)
};
at::Tensor gelu_tanh_mlp(const at::Tensor& x, const MlpWeights& weights, at::ScalarType compute_dtype,
                         Products products = Products::kComputeDtype);

// Looks up rows of `table` (rows, D) by `ids` (...) i64 -> (..., D), f32 (f64 for an f64 table). The gradient
// is dense: it is summed in f32, then cast to the table's dtype.
at::Tensor embedding_rows(const at::Tensor& table, const at::Tensor& ids);

// Returns captions' rows (T, D). Those of a caption b that is dropped, (B) bool, are replaced by `null_rows`
// (L, D): a row at index i of its padded caption becomes null row i. Caption b has the rows from offsets[b]
// on, (B + 1) i32. `positions` (T) i64 are the rows' indices; undefined: captions begin at row 0 and have no
// gaps.
at::Tensor rows_with_nulls(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& dropped,
                           const at::Tensor& positions, const at::Tensor& null_rows);

// LayerNorm without affine, then * (1 + scale) + shift (adaLN, Peebles & Xie 2023, eq. in sec. 3.2). x
// (B, N, D) is f32 or low precision; shift and scale (B, D) may have any strides, the last one unit. The
// result is in `out_dtype`.
at::Tensor adaln_modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                          at::ScalarType out_dtype);

// x + gate[:, None, :] * y. x (B, N, D) and the result have the residual dtype, y (B, N, D) the compute
// dtype; gate (B, D).
at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y);

// A residual stream, and its rows normalised and modulated for the next branch.
struct NormedResidual {
  at::Tensor x, normed;
};

// adaln_modulate(x, ...) of a stream that goes on beside the branch. The result's `x` is x again, and one
// pass of backward adds its gradient to the norm's.
NormedResidual adaln_branch(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps,
                            at::ScalarType out_dtype);

// adaln_branch(gated_residual(x, gate, y), ...), in one pass forward and one backward.
NormedResidual gated_residual_adaln(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y,
                                    const at::Tensor& shift, const at::Tensor& scale, double eps,
                                    at::ScalarType out_dtype);

// softmax(q k^T * scale) v from the packed projection. qkv (B, N, 3, H, d) contiguous -> (B, N, H * d). The
// gradient is computed packed, without a concatenation.
at::Tensor packed_attention(const at::Tensor& qkv, double scale);

// softmax(q k^T * scale + mask) v -> (B, H, N, d), by those of ATen's kernels that never hold the scores of
// all pairs. q (B, H, N, d), k and v (B, H, M, d). `mask` (B, H, N, M) is added, or undefined. The scale is
// 1 / sqrt(d) if none is given.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask = {}, std::optional<double> scale = {});

// softmax(q k^T * scale) v against rows without padding, softmax in f32. q (B, N, H, d); k, v (T, H, d), unit
// stride last; all have one dtype. Sample b attends to rows [offsets[b], offsets[b + 1]). A sample without
// rows gets zeros, and so do the gradients of rows that belong to no sample. -> (B, N, H * d).
at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale);

// Linear attention with ReLU features (Katharopoulos et al. 2020; Sana, Xie et al. 2024, sec. 2.2):
// out = v^T relu(k) relu(q) / (sum relu(k) . relu(q) + 1e-15). q, k, v (B, N, H, d) have unit stride last and
// one dtype; sums are f32. -> (B, N, H * d).
at::Tensor relu_linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// The middle of a GLUMBConv (Sana, sec. 2.2): u = conv3x3(silu(h)) + bias, depthwise with zero padding, then
// u[.., :C] * silu(u[.., C:]). h (B, height * width, 2C) with row-major pixels; weight (2C, 1, 3, 3), bias
// (2C). Saves h alone; sums are f32. -> (B, height * width, C), dtype of h.
at::Tensor glu_depthwise_conv(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias,
                              int64_t height, int64_t width);

// GroupNorm with affine, then SiLU if `silu`. x (B, C, H, W) is contiguous or channels-last, and the result
// like it. Statistics are f32.
at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu);

// GroupNorm with affine, then SiLU if `silu`.
struct GroupNormLayer {
  at::Tensor weight, bias;  // (C)
  int64_t num_groups;
  double eps;
  bool silu;
};

// LayerNorm with affine over the last dimension of x (..., D). Statistics are f32, the result is in
// `out_dtype`.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      at::ScalarType out_dtype);

// linear(layer_norm(x), weight, bias) that saves x alone and normalises it again in backward. Several
// `weights` (out, D) are one product, one after another; `bias` is that of all.
struct LayerNormLayer {
  at::Tensor weight, bias;  // (D)
  double eps;
};
at::Tensor layer_norm_linears(const at::Tensor& x, const LayerNormLayer& norm,
                              const std::vector<at::Tensor>& weights, const std::optional<at::Tensor>& bias,
                              at::ScalarType compute_dtype);

// h (..., 2F) -> h[..., :F] * gelu(h[..., F:]) with the exact (erf) GELU. Saves h alone. (Shazeer 2020)
at::Tensor geglu(const at::Tensor& h);

// linear(geglu(h), weight (out, F), bias) that saves h alone and recomputes geglu in backward.
at::Tensor geglu_linear(const at::Tensor& h, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        at::ScalarType compute_dtype);

// Convolution of x (B, C, H, W) by weight (out, C / groups, k, k), with zeros around the picture. x, weight
// and bias are cast to `compute_dtype`. The result stays in it and in the memory format of x.
struct ConvolutionShape {
  int64_t stride = 1, padding = 0, groups = 1;
};
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const ConvolutionShape& shape, at::ScalarType compute_dtype);

// conv2d of the normalised x. Saves x alone and normalises it again in backward.
at::Tensor group_norm_conv2d(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const ConvolutionShape& shape,
                             at::ScalarType compute_dtype);

// x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension, in f32. x (..., D) and the result have
// one dtype; weight (D), and bias (D) if there is one.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    double eps);

// x * sigmoid(x).
at::Tensor silu(const at::Tensor& x);

// Moves each 2 x 2 pixels of x into four channels beside each other, (B, C, H, W) -> (B, 4 C, H / 2, W / 2),
// and back, as ATen's pixel_unshuffle and pixel_shuffle do, but the result is channels-last on every device.
// Each channel of an x (B, 4 C / repeats, H, W) counts `repeats` times.
at::Tensor pixels_to_channels(const at::Tensor& x);
at::Tensor channels_to_pixels(const at::Tensor& x, int64_t repeats = 1);

// The mean over each group of neighbouring channels: x (B, C, H, W) -> (B, groups, H, W).
at::Tensor mean_of_channels(const at::Tensor& x, int64_t groups);

// Returns values that the host has computed, on a device. A dry run of a CPU copies nothing, because there
// they already are where they are needed.
at::Tensor on_device(const at::Tensor& host_values, at::Device device);

// One fused pass over flat memory: unscale, clip, AdamW with decoupled decay (Loshchilov & Hutter 2019),
// EMAs, cast. All tensors are 1-D of one length n. The pass is elementwise, so any slice (a ZeRO shard) gives
// the same bits.
struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;               // 1-based, for bias correction
  double grad_scale;          // multiplies the gradient first: 1 / loss_scale * clip coefficient
  at::Tensor device_scale{};  // 0-d f32 on the device, replaces grad_scale; NaN moves nothing
};
struct EmaSlice {
  at::Tensor weights;  // (n) f32, updated as d * e + (1 - d) * master
  double decay;
};
void adamw_ema_step_(at::Tensor& master,                           // (n) f32
                     const at::Tensor& grad,                       // (n) f32, bf16 or fp16
                     at::Tensor& exp_avg, at::Tensor& exp_avg_sq,  // (n) f32
                     std::vector<EmaSlice>& emas,
                     at::Tensor* compute_weights,  // (n) bf16 or fp16 copy to refresh, or null
                     const AdamWStep& options);

// Returns the sum of squares of a flat gradient (f32, bf16, fp16) in f64, as a 0-d f64 tensor on its device.
// inf and NaN propagate.
at::Tensor sum_of_squares(const at::Tensor& flat);

// Returns the factor of the gradients, clip coefficient / loss_scale, as a 0-d f32 tensor; the host need not
// wait for it. The norm comes from `sum_of_squares` (0-d f64), and optim/grad_norm.h clips by the same rule.
// NaN if the norm or one of `losses` (n) f64 is not finite.
at::Tensor step_scale(const at::Tensor& sum_of_squares, const at::Tensor& losses, double max_grad_norm,
                      double loss_scale);

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
at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale);
at::Tensor relu_linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
at::Tensor glu_depthwise_conv(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias,
                              int64_t height, int64_t width);
at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                           const at::Tensor& bias, double eps, bool silu);
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      at::ScalarType out_dtype);
at::Tensor geglu(const at::Tensor& h);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    double eps);
at::Tensor pixels_to_channels(const at::Tensor& x);
at::Tensor channels_to_pixels(const at::Tensor& x, int64_t repeats);
void adamw_ema_step_(at::Tensor& master, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                     std::vector<EmaSlice>& emas, at::Tensor* compute_weights, const AdamWStep& options);
}  // namespace reference

}  // namespace kiln::ops
