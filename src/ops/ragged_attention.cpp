#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "core/text/some_of.h"
#include "ops/attention.h"
#include "ops/caption_attention.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/varlen_attention.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

using Offsets = std::vector<int64_t>;

constexpr Kernel<decltype(cpu::ragged_attention)> kRagged{.cpu = cpu::ragged_attention,
                                                          .planned_cpu = cpu::ragged_attention};
constexpr Kernel<decltype(cpu::ragged_attention_backward)> kRaggedGrad{
    .cpu = cpu::ragged_attention_backward, .planned_cpu = cpu::ragged_attention_backward};

// On a CPU. Saves q, k, v, the output and the softmax sums.
struct RaggedAttention : torch::autograd::Function<RaggedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Offsets& offsets, double scale) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::ragged_attention", q, k, v);
    const AttentionRows rows{unit_last(q), unit_last(k), unit_last(v), offsets, scale};
    const AttentionResult result = kRagged.on(q)(rows);
    ctx->save_for_backward({rows.q, rows.k, rows.v, result.out, result.log_sum});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["scale"] = scale;
    mark.outputs(result.out, result.log_sum);
    return result.out.flatten(2);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ScratchScope scope(Scratch::kAttention);
    const auto saved = ctx->get_saved_variables();
    const AttentionRows rows{saved[0], saved[1], saved[2], ctx->saved_data["offsets"].toIntVector(),
                             ctx->saved_data["scale"].toDouble()};
    OpMark mark("kiln::ragged_attention_backward", grads[0], rows.q, rows.k, rows.v, saved[3], saved[4]);
    const AttentionGrads result = kRaggedGrad.on(rows.q)(grads[0].contiguous().view(rows.q.sizes()), rows,
                                                         {saved[3], saved[4], {}, {}});
    mark.outputs(result.q, result.k, result.v);
    return {result.q, result.k, result.v, at::Tensor(), at::Tensor()};
  }
};

void check_ragged(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Offsets& offsets) {
  const auto fits = [&](const at::Tensor& rows) {
    return rows.dim() == 3 && rows.size(1) == q.size(2) && rows.size(2) == q.size(3) &&
           rows.scalar_type() == q.scalar_type();
  };
  if (q.dim() != 4 || !fits(k) || !fits(v) || k.size(0) != v.size(0))
    fail("ragged_attention", "expected q (B, N, H, d) and k, v (T, H, d) of one dtype, got ({}), ({}), ({})",
         fmt::join(q.sizes(), ", "), fmt::join(k.sizes(), ", "), fmt::join(v.sizes(), ", "));
  bool ascending = static_cast<int64_t>(offsets.size()) == q.size(0) + 1 && offsets.front() >= 0 &&
                   offsets.back() <= k.size(0);
  for (size_t b = 1; b < offsets.size(); ++b) ascending = ascending && offsets[b - 1] <= offsets[b];
  if (!ascending)
    fail("ragged_attention", "expected {} ascending offsets within {} rows, got {}", q.size(0) + 1, k.size(0),
         some_of(offsets));
}

// A dry run assumes a GPU of compute capability 8.0.
constexpr Kernel<int()> kCapability{.cuda = cuda::capability, .planned_cuda = [] { return 80; }};

// Returns kNone as well where q is not on a GPU.
AttentionEngine gpu_engine(const at::Tensor& q) {
  const auto capability = kCapability.on(q);
  return capability && q.numel() > 0 ? varlen_engine(q.scalar_type(), q.size(3), capability())
                                     : AttentionEngine::kNone;
}

}  // namespace

at::Tensor unit_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

void zero_unowned(const at::Tensor& rows, const std::vector<int64_t>& offsets) {
  rows.narrow(0, 0, offsets.front()).zero_();
  rows.narrow(0, offsets.back(), rows.size(0) - offsets.back()).zero_();
}

at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale) {
  return caption_attention(q, k, v, offsets, /*device_offsets=*/{}, scale);
}

at::Tensor caption_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                             double scale) {
  check_ragged(q, k, v, offsets);
  const bool has_rows = offsets.front() < offsets.back();
  if (const AttentionEngine engine = gpu_engine(q); engine != AttentionEngine::kNone && has_rows)
    return varlen_attention(q, k, v, offsets, device_offsets, scale, engine);
  if (!has_cpu_kernel(q) || q.numel() == 0) return reference::ragged_attention(q, k, v, offsets, scale);
  return RaggedAttention::apply(q, k, v, offsets, scale);
}

at::Tensor cross_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  Offsets offsets;
  for (int64_t b = 0; b <= q.size(0); ++b) offsets.push_back(b * k.size(1));
  const bool on_gpu = k.size(1) > 0 && gpu_engine(q) != AttentionEngine::kNone;
  return caption_attention(q, k.flatten(0, 1), v.flatten(0, 1), offsets,
                           on_gpu ? even_offsets(q.size(0), k.size(1), q.device()) : at::Tensor(), scale);
}

namespace reference {

at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale) {
  const at::ScalarType dtype = q.scalar_type();
  const at::ScalarType math = dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> samples;
  for (int64_t b = 0; b < q.size(0); ++b) {
    if (offsets[b] == offsets[b + 1]) {
      samples.push_back(at::zeros({1, q.size(1), q.size(2) * q.size(3)}, q.options()));
      continue;
    }
    const at::Tensor scores =
        at::matmul(sample_tokens(q, b).to(math), sample_rows(k, offsets, b).to(math).transpose(-2, -1)) *
        scale;
    const at::Tensor attended = at::matmul(at::softmax(scores, -1), sample_rows(v, offsets, b).to(math));
    samples.push_back(attended.transpose(1, 2).flatten(2).to(dtype));
  }
  return samples.empty() ? q.flatten(2) : at::cat(samples);
}

}  // namespace reference
}  // namespace kiln::ops
