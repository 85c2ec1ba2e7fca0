// Calls the kernels with tensors on a CUDA device. The functions use the tensor's device and its current
// stream, and throw errors. In a build without kernels, kernels_compiled() and serves_rows() are false,
// epilogue_product() and attention_grads() do nothing, capability() is 0, and the others must not be called.
// ops/cuda/kernels.h documents the arguments.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/kernel_args.h"

namespace kiln::ops::cuda {

bool kernels_compiled();
// Returns the compute capability of the current device, 90 for 9.0, or 0 if there is none.
int capability();

void gelu_tanh(const at::Tensor& in, const at::Tensor& out);
void gelu_tanh_grad(const at::Tensor& grad, const at::Tensor& in, const at::Tensor& grad_in);
// True if the kernels on rows serve a stream of x's dtype and width together with `low`.
bool serves_rows(const at::Tensor& x, at::ScalarType low);
void adaln(const AdalnArgs& args, const GatedResidualArgs& branch, const at::Tensor& x_in,
           const at::Tensor& x_out, const at::Tensor& out);
void adaln_grad(const AdalnArgs& args, const GatedResidualArgs& branch, const AdalnGrads& grads,
                const at::Tensor& grad, const at::Tensor& partials, int64_t rows_per_partial);
void gated_residual(const GatedResidualArgs& args, const at::Tensor& x, const at::Tensor& out);
void gated_residual_grad(const GatedResidualArgs& args, const at::Tensor& grad, const at::Tensor& dy,
                         const at::Tensor& dgate, const at::Tensor& partials, int64_t rows_per_partial);
void group_norm(const GroupNormArgs& args, const at::Tensor& out, const at::Tensor& partials);
void group_norm_grad(const GroupNormArgs& args, const GroupNormGradArgs& grads, const at::Tensor& grad);
// Returns false, and does nothing, if cuBLASLt has no such product. `workspace` is bytes of scratch.
bool epilogue_product(const EpilogueProductArgs& args, const at::Tensor& workspace);
struct EpilogueCount {
  const char* product;
  int64_t served, refused;
};
// Returns what epilogue_product() returned in this process, for each product. Empty in a build without
// kernels.
std::vector<EpilogueCount> epilogue_counts();
// Takes the nth of the algorithms that cuBLASLt proposes for each shape, instead of its first, or the fastest
// of them, timed once for each shape. Does nothing in a build without kernels.
void take_epilogue_algorithm(int nth);
inline constexpr int kNumEpilogueAlgorithms = 8, kFastestEpilogueAlgorithm = -1;
bool times_epilogue_algorithms();
// Takes earlier choices of the fastest for the current device, and returns those that it has now. They hold
// for one kind of GPU and this version of cuBLASLt (0: a build without kernels).
void set_product_choices(const std::vector<ProductChoice>& choices);
std::vector<ProductChoice> product_choices();
int64_t cublaslt_version();
// Computes *scale and the values divided by it. `rows` and `columns` may be undefined.
void to_fp8(const at::Tensor& values, float format_largest, const at::Tensor& scale, at::ScalarType format,
            const at::Tensor& rows, const at::Tensor& columns);
// Backward of attention by cuDNN into packed memory. Returns false, and does nothing, if cuDNN has no such
// kernel. All tensors are dense (ops/kernel_args.h).
bool attention_grads(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& log_sum,
                     const at::Tensor& grad_out, double scale, const at::Tensor& grad_qkv);
// Packs the gradients of q, k and v (B, H, N, d) into (B, N, 3, H, d).
at::Tensor pack_heads(const at::Tensor& grad_q, const at::Tensor& grad_k, const at::Tensor& grad_v);
void adamw(const AdamwElements& elements, const AdamwFactors& factors, const at::Tensor& master);
void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, uint64_t first, uint64_t seed,
                      uint32_t draw, uint64_t index);
void sum_of_squares(const at::Tensor& flat, const at::Tensor& sum);
void step_scale(const at::Tensor& sum_of_squares, const at::Tensor& losses, double max_norm,
                double loss_scale, const at::Tensor& scale);

}  // namespace kiln::ops::cuda
