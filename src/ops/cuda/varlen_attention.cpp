#include "ops/cuda/varlen_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "core/aten.h"
#include "core/scratch.h"
#include "ops/caption_attention.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

using Offsets = std::vector<int64_t>;

VarlenTokens tokens_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Offsets& offsets,
                       const at::Tensor& k_offsets, double scale) {
  int64_t most_rows = 1;
  for (size_t b = 1; b < offsets.size(); ++b) most_rows = std::max(most_rows, offsets[b] - offsets[b - 1]);
  return {.q = unit_last(q).flatten(0, 1),
          .k = unit_last(k),
          .v = unit_last(v),
          .q_offsets = even_offsets(q.size(0), q.size(1), q.device()),
          .k_offsets = k_offsets,
          .num_queries = q.size(1),
          .most_rows = most_rows,
          .scale = scale};
}

// Through ATen's dispatcher: on a CPU the tests' emulation stands behind it.
constexpr Kernel<decltype(cuda::varlen_attention)> kVarlen{
    .cpu = cuda::varlen_attention, .cuda = cuda::varlen_attention, .planned_cuda = planned::varlen_attention};
constexpr Kernel<decltype(cuda::varlen_attention_backward)> kVarlenGrad{
    .cpu = cuda::varlen_attention_backward,
    .cuda = cuda::varlen_attention_backward,
    .planned_cuda = planned::varlen_attention_backward};

// Calls body(sample) for every sample without rows.
template <class Body>
void for_each_empty(const Offsets& offsets, const Body& body) {
  for (size_t b = 1; b < offsets.size(); ++b)
    if (offsets[b - 1] == offsets[b]) body(static_cast<int64_t>(b - 1));
}

// Saves q, k, v, the output and the softmax sums.
struct VarlenAttention : torch::autograd::Function<VarlenAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Offsets& offsets, const at::Tensor& k_offsets,
                            double scale, AttentionEngine engine) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::ragged_attention", q, k, v);
    const VarlenTokens t = tokens_of(q, k, v, offsets, k_offsets, scale);
    const AttentionResult result = kVarlen.on(q)(t, engine);
    at::Tensor out = result.out.view({q.size(0), q.size(1), q.size(2) * q.size(3)});
    for_each_empty(offsets, [&](int64_t b) { out.select(0, b).zero_(); });
    ctx->save_for_backward(
        {t.q, t.k, t.v, t.q_offsets, t.k_offsets, result.out, result.log_sum, result.seed, result.offset});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["num_queries"] = t.num_queries;
    ctx->saved_data["most_rows"] = t.most_rows;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["engine"] = static_cast<int64_t>(engine);
    mark.outputs(out, result.log_sum);
    return out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ScratchScope scope(Scratch::kAttention);
    const auto saved = ctx->get_saved_variables();
    const VarlenTokens t{.q = saved[0],
                         .k = saved[1],
                         .v = saved[2],
                         .q_offsets = saved[3],
                         .k_offsets = saved[4],
                         .num_queries = ctx->saved_data["num_queries"].toInt(),
                         .most_rows = ctx->saved_data["most_rows"].toInt(),
                         .scale = ctx->saved_data["scale"].toDouble()};
    const AttentionResult result{saved[5], saved[6], saved[7], saved[8]};
    const Offsets offsets = ctx->saved_data["offsets"].toIntVector();
    const auto engine = static_cast<AttentionEngine>(ctx->saved_data["engine"].toInt());
    const std::vector<int64_t> q_sizes{grads[0].size(0), t.num_queries, t.q.size(1), t.q.size(2)};
    OpMark mark("kiln::ragged_attention_backward", grads[0], t.q.view(q_sizes), t.k, t.v, result.out,
                result.log_sum);
    const at::Tensor grad_out = grads[0].contiguous().view(t.q.sizes());
    const VarlenGrads made = kVarlenGrad.on(grad_out)(grad_out, t, result, engine);
    const at::Tensor grad_q = made.q.view(q_sizes);
    for_each_empty(offsets, [&](int64_t b) { grad_q.select(0, b).zero_(); });
    zero_unowned(made.k, offsets);
    zero_unowned(made.v, offsets);
    mark.outputs(grad_q, made.k, made.v);
    return {grad_q, made.k, made.v, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor even_offsets(int64_t num_samples, int64_t each, at::Device device) {
  return at::arange(0, num_samples * each + 1, each, at::TensorOptions(device).dtype(at::kInt));
}

AttentionEngine varlen_engine(at::ScalarType dtype, int64_t head_dim, int64_t capability) {
  const bool is_low = dtype == at::kHalf || (dtype == at::kBFloat16 && capability >= 80);
  const int64_t alignment = is_low ? 8 : 4;  // elements of a 16-byte access
  if ((!is_low && dtype != at::kFloat) || head_dim % alignment != 0) return AttentionEngine::kNone;
  constexpr int64_t kWidestFlash = 192;  // beyond it, backward needs more shared memory than most GPUs have
  return is_low && capability >= 80 && head_dim <= kWidestFlash ? AttentionEngine::kFlash
                                                                : AttentionEngine::kMemoryEfficient;
}

at::Tensor varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                            double scale, AttentionEngine engine) {
  const at::Tensor k_offsets =
      device_offsets.defined() ? device_offsets : at::tensor(offsets, at::kInt).to(q.device());
  return VarlenAttention::apply(q, k, v, offsets, k_offsets, scale, engine);
}

}  // namespace kiln::ops
