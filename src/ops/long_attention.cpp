#include "ops/long_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

void flash_on_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                  const at::Tensor& out, const at::Tensor& sums) {
  const auto [attended, sum] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, {}, scale);
  out.copy_(attended);
  sums.copy_(sum);
}

void flash_grad_on_cpu(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& out, const at::Tensor& sums, double scale, const at::Tensor& grad_q,
                       const at::Tensor& grad_k, const at::Tensor& grad_v) {
  const auto [from_q, from_k, from_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, out, sums, 0.0, false, {}, scale);
  grad_q.copy_(from_q);
  grad_k.copy_(from_k);
  grad_v.copy_(from_v);
}

constexpr Kernel<decltype(flash_on_cpu)> kFlash{.cpu = flash_on_cpu,
                                                .planned_cpu = planned::flash_attention_of_cpu};
constexpr Kernel<decltype(flash_grad_on_cpu)> kFlashGrad{
    .cpu = flash_grad_on_cpu, .planned_cpu = planned::flash_attention_backward_of_cpu};

// Calls flash attention for each sample.
struct LongAttention : torch::autograd::Function<LongAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::vector<int64_t>& offsets, double scale) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::ragged_attention", q, k, v);
    const at::Tensor out = at::empty(q.sizes(), q.options());  // (B, N, H, d)
    const at::Tensor log_sum = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));  // (B, N, H)
    for (int64_t b = 0; b < q.size(0); ++b) {
      const at::Tensor result = sample_tokens(out, b), sums = log_sum.narrow(0, b, 1).transpose(1, 2);
      if (offsets[b] == offsets[b + 1]) {
        result.zero_();
        sums.zero_();
      } else {
        kFlash.on(q)(sample_tokens(q, b), sample_rows(k, offsets, b), sample_rows(v, offsets, b), scale,
                     result, sums);
      }
    }
    ctx->save_for_backward({q, k, v, out, log_sum});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["scale"] = scale;
    mark.outputs(out, log_sum);
    return out.flatten(2);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ScratchScope scope(Scratch::kAttention);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &log_sum = saved[4];
    const std::vector<int64_t> offsets = ctx->saved_data["offsets"].toIntVector();
    const double scale = ctx->saved_data["scale"].toDouble();
    OpMark mark("kiln::ragged_attention_backward", grads[0], q, k, v, out, log_sum);
    const at::Tensor grad_out = grads[0].contiguous().view(out.sizes());
    const at::Tensor grad_q = at::empty(q.sizes(), q.options());
    const at::Tensor grad_k = at::empty(k.sizes(), k.options()), grad_v = at::empty(v.sizes(), v.options());
    zero_unowned(grad_k, offsets);
    zero_unowned(grad_v, offsets);
    for (int64_t b = 0; b < q.size(0); ++b) {
      const at::Tensor to_q = sample_tokens(grad_q, b);
      if (offsets[b] == offsets[b + 1]) {
        to_q.zero_();
        continue;
      }
      kFlashGrad.on(q)(sample_tokens(grad_out, b), sample_tokens(q, b), sample_rows(k, offsets, b),
                       sample_rows(v, offsets, b), sample_tokens(out, b),
                       log_sum.narrow(0, b, 1).transpose(1, 2), scale, to_q, sample_rows(grad_k, offsets, b),
                       sample_rows(grad_v, offsets, b));
    }
    mark.outputs(grad_q, grad_k, grad_v);
    return {grad_q, grad_k, grad_v, at::Tensor(), at::Tensor()};
  }
};

// True if every row belongs to a sample, and all samples have equally many.
bool have_equally_many(const at::Tensor& rows, const std::vector<int64_t>& offsets) {
  const int64_t samples = static_cast<int64_t>(offsets.size()) - 1;
  bool are_even = rows.size(0) % samples == 0;
  for (int64_t b = 0; b <= samples; ++b) are_even = are_even && offsets[b] * samples == b * rows.size(0);
  return are_even;
}

}  // namespace

void zero_unowned(const at::Tensor& rows, const std::vector<int64_t>& offsets) {
  rows.narrow(0, 0, offsets.front()).zero_();
  rows.narrow(0, offsets.back(), rows.size(0) - offsets.back()).zero_();
}

bool prefers_long_attention(const at::Tensor& q, const std::vector<int64_t>& offsets) {
  constexpr int64_t kManyRows = 256;  // mean rows of a sample; a training step takes equally long at 300
  const bool is_fast = q.scalar_type() == at::kBFloat16 && cpu_product_dtype(at::kBFloat16) == at::kBFloat16;
  return is_fast && offsets.back() - offsets.front() > kManyRows * q.size(0);
}

at::Tensor long_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::vector<int64_t>& offsets, double scale) {
  if (!have_equally_many(k, offsets)) return LongAttention::apply(q, k, v, offsets, scale);
  // One call takes all samples. It copies nothing, and has a thread for every head of each of them.
  const auto heads = [&](const at::Tensor& rows) {
    return rows.unflatten(0, {q.size(0), rows.size(0) / q.size(0)}).transpose(1, 2);
  };
  return fused_attention(q.transpose(1, 2), heads(k), heads(v), /*mask=*/{}, scale)
      .transpose(1, 2)
      .flatten(2);
}

}  // namespace kiln::ops
