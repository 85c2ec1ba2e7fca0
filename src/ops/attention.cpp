#include "ops/attention.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

at::Tensor aten_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/false, scale);
}

constexpr auto kFusedAttention = on_all(aten_attention, planned::fused_attention);
// On both kinds of CPU: a planned one has the loop that does nothing.
constexpr Kernel<decltype(cpu::fused_attention)> kOwnFused{.cpu = cpu::fused_attention,
                                                           .planned_cpu = cpu::fused_attention};
constexpr Kernel<decltype(cuda::attention_engine)> kEngine{.cpu = cpu::attention_engine,
                                                           .cuda = cuda::attention_engine,
                                                           .planned_cpu = cpu::attention_engine,
                                                           .planned_cuda = cpu::attention_engine};
constexpr Kernel<decltype(cuda::attention)> kAttention{.cpu = cpu::attention,
                                                       .cuda = cuda::attention,
                                                       .planned_cpu = cpu::attention,
                                                       .planned_cuda = planned::attention_of_cuda};
constexpr Kernel<decltype(cuda::attention_backward)> kAttentionGrad{
    .cpu = cpu::attention_backward,
    .cuda = cuda::attention_backward,
    .planned_cpu = cpu::attention_backward,
    .planned_cuda = planned::attention_backward_of_cuda};

constexpr Kernel<decltype(cuda::packed)> kPack{.cuda = cuda::packed, .planned_cuda = planned::packed};

// Returns a gradient like qkv. Where attention's kernel leaves its parts, packing them is a second operation.
at::Tensor packed_grads(const at::Tensor& grad, const at::Tensor& qkv, const AttentionResult& result,
                        const AttentionPass& pass) {
  AttentionGrads grads;
  {
    OpMark mark("kiln::packed_attention_backward", grad, qkv, result.out, result.log_sum);
    grads = kAttentionGrad.on(qkv)(grad.contiguous(), qkv, result, pass);
    grads.packed.defined() ? mark.outputs(grads.packed) : mark.outputs(grads.q, grads.k, grads.v);
  }
  if (grads.packed.defined()) return grads.packed;
  OpMark mark("kiln::pack_heads", grads.q, grads.k, grads.v);
  const at::Tensor packed = kPack.on(qkv)(grads);
  mark.outputs(packed);
  return packed;
}

// Saves the packed projection, the output and the softmax sums: O(N), never the (N, N) probabilities.
struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, double scale,
                            AttentionEngine engine) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::packed_attention", qkv);
    const AttentionResult result = kAttention.on(qkv)(qkv, scale, engine);
    ctx->save_for_backward({qkv, result.out, result.log_sum, result.seed, result.offset});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["engine"] = static_cast<int64_t>(engine);
    ctx->saved_data["packs"] = OpChoicesScope::current().pack_gradients;
    mark.outputs(result.out, result.log_sum);
    return result.out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const AttentionResult result{saved[1], saved[2], saved[3], saved[4]};
    const AttentionPass pass{.scale = ctx->saved_data["scale"].toDouble(),
                             .engine = static_cast<AttentionEngine>(ctx->saved_data["engine"].toInt()),
                             .packs = ctx->saved_data["packs"].toBool()};
    const ScratchScope scope(Scratch::kAttention);
    return {packed_grads(grads[0], qkv, result, pass), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

namespace reference {

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  const at::ScalarType dtype = qkv.scalar_type();
  const at::Tensor packed = qkv.to(product_dtype(qkv.device(), dtype));
  const at::Tensor q = attention_heads(packed, 0), k = attention_heads(packed, 1),
                   v = attention_heads(packed, 2);
  const at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) * scale;  // (B, H, N, N)
  const at::Tensor weights = at::softmax(scores, -1, dtype == at::kDouble ? at::kDouble : at::kFloat);
  return at::matmul(weights.to(packed.scalar_type()), v).transpose(1, 2).flatten(2).to(dtype);
}

}  // namespace reference

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask, std::optional<double> scale) {
  const std::optional<at::Tensor> given = mask.defined() ? std::optional(mask) : std::nullopt;
  const auto own = kOwnFused.serving(q);
  if (!own || !cpu::serves_fused(q, k, v, given)) return kFusedAttention.on(q)(q, k, v, given, scale);
  OpMark mark("kiln::fused_attention", q, k, v, mask);
  const at::Tensor out = own(q, k, v, given, scale);
  mark.outputs(out);
  return out;
}

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  if (qkv.dim() != 5 || qkv.size(2) != 3 || !qkv.is_floating_point())
    fail("packed_attention", "expected floating qkv (B, N, 3, H, d), got {} {}",
         c10::toString(qkv.scalar_type()), fmt::join(qkv.sizes(), "x"));
  const at::Tensor packed = qkv.contiguous();
  const AttentionEngine engine =
      packed.numel() == 0 ? AttentionEngine::kNone : kEngine.on(packed)(packed, scale);
  return engine == AttentionEngine::kNone ? reference::packed_attention(packed, scale)
                                          : PackedAttention::apply(packed, scale, engine);
}

}  // namespace kiln::ops
