// What planned devices allocate where a real one computes: results that only the kernel makes, and the
// scratch that kernels and libraries take beside the operation's memory. Arguments are those of the kernels.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace kiln::ops {
struct AdamWStep;  // ops/ops.h
enum class AttentionEngine : int64_t;
struct AttentionGrads;  // ops/attention.h
struct AttentionPass;
struct AttentionResult;
struct Moment8bit;       // ops/update/adamw_8bit.h
struct ProductOperands;  // ops/matrix_products.h
struct VarlenGrads;      // ops/cuda/varlen_attention.h
struct VarlenTokens;
}  // namespace kiln::ops

namespace kiln::ops::planned {

at::Tensor choose_rows(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& dropped,
                       const at::Tensor& positions, const at::Tensor& null_rows);

at::Tensor on_device_of_cpu(const at::Tensor& host_values, at::Device device);
// ATen's product, and oneDNN's scratch.
at::Tensor product_of_cpu(ProductOperands operands);
// ATen's sums, and the wider copies that a CPU makes of the narrower operands.
at::Tensor mixed_sum_of_cpu(const at::Tensor& a, const at::Tensor& b);
void mixed_add_of_cpu(const at::Tensor& sum, const at::Tensor& term);

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& mask, std::optional<double> scale);
AttentionResult attention_of_cuda(const at::Tensor& qkv, double scale, AttentionEngine engine);
AttentionGrads attention_backward_of_cuda(const at::Tensor& grad_out, const at::Tensor& qkv,
                                          const AttentionResult& result, const AttentionPass& pass);
at::Tensor packed(const AttentionGrads& grads);
// On a GPU.
AttentionResult varlen_attention(const VarlenTokens& tokens, AttentionEngine engine);
VarlenGrads varlen_attention_backward(const at::Tensor& grad_out, const VarlenTokens& tokens,
                                      const AttentionResult& result, AttentionEngine engine);

// What is alive at once when a step over blocks is composed of ATen's operations.
void adamw_8bit_blocks(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                       const Moment8bit& square, const AdamWStep& options);

}  // namespace kiln::ops::planned
