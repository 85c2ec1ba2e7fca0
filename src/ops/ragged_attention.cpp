#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "ops/kernel_types.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

using Offsets = std::vector<int64_t>;

// fp16 on a CPU is storage.
at::Tensor stored_operand(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf && computes_on_cpu(tensor) ? tensor.to(at::kFloat) : tensor;
}

// Rows of one sample as (1, H, L, d), a view.
at::Tensor rows_of(const at::Tensor& rows, const Offsets& offsets, int64_t b) {
  return rows.narrow(0, offsets[b], offsets[b + 1] - offsets[b]).unsqueeze(0).transpose(1, 2);
}

// Tokens (B, N, H, d) of one sample as (1, H, N, d), a view.
at::Tensor tokens_of(const at::Tensor& tokens, int64_t b) { return tokens.narrow(0, b, 1).transpose(1, 2); }

// Rows that no sample has, before the first and after the last.
void zero_unowned(const at::Tensor& rows, const Offsets& offsets) {
  rows.narrow(0, 0, offsets.front()).zero_();
  rows.narrow(0, offsets.back(), rows.size(0) - offsets.back()).zero_();
}

// ATen's flash attention, sample by sample: no product touches padding. On meta it allocates what that
// leaves.
struct RaggedAttention : torch::autograd::Function<RaggedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q_in, const at::Tensor& k_in,
                            const at::Tensor& v_in, const Offsets& offsets, double scale) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::ragged_attention", q_in, k_in, v_in);
    const at::Tensor q = stored_operand(q_in), k = stored_operand(k_in), v = stored_operand(v_in);
    const at::Tensor out = at::empty(q.sizes(), q.options());  // (B, N, H, d)
    const at::Tensor log_sum = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));  // (B, N, H)
    for (int64_t b = 0; b < q.size(0); ++b) {
      const at::Tensor result = tokens_of(out, b), sums = log_sum.narrow(0, b, 1).transpose(1, 2);
      if (offsets[b] == offsets[b + 1]) {
        result.zero_();
        sums.zero_();
      } else if (q.is_meta()) {
        at::empty_like(result);
        at::empty_like(sums);
      } else {
        const auto [attended, sum] = at::_scaled_dot_product_flash_attention_for_cpu(
            tokens_of(q, b), rows_of(k, offsets, b), rows_of(v, offsets, b), 0.0, false, {}, scale);
        result.copy_(attended);
        sums.copy_(sum);
      }
    }
    ctx->save_for_backward({q_in, k_in, v_in, out, log_sum});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["scale"] = scale;
    const at::Tensor heads = out.flatten(2).to(q_in.scalar_type());
    mark.outputs(heads, log_sum);
    return heads;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ScratchScope scope(Scratch::kAttention);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor q = stored_operand(saved[0]), k = stored_operand(saved[1]), v = stored_operand(saved[2]);
    const at::Tensor &out = saved[3], &log_sum = saved[4];
    const Offsets offsets = ctx->saved_data["offsets"].toIntVector();
    const double scale = ctx->saved_data["scale"].toDouble();
    OpMark mark("kiln::ragged_attention_backward", grads[0], saved[0], saved[1], saved[2], out, log_sum);
    const at::Tensor grad_out = stored_operand(grads[0].contiguous().view(out.sizes()));
    const at::Tensor grad_q = at::empty(q.sizes(), q.options());
    const at::Tensor grad_k = at::empty(k.sizes(), k.options()), grad_v = at::empty(v.sizes(), v.options());
    zero_unowned(grad_k, offsets);
    zero_unowned(grad_v, offsets);
    for (int64_t b = 0; b < q.size(0); ++b) {
      const at::Tensor to_q = tokens_of(grad_q, b);
      if (offsets[b] == offsets[b + 1]) {
        to_q.zero_();
        continue;
      }
      const at::Tensor to_k = rows_of(grad_k, offsets, b), to_v = rows_of(grad_v, offsets, b);
      if (q.is_meta()) {
        const at::Tensor parts[] = {at::empty_like(to_q), at::empty_like(to_k), at::empty_like(to_v)};
        continue;
      }
      const auto [from_q, from_k, from_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          tokens_of(grad_out, b), tokens_of(q, b), rows_of(k, offsets, b), rows_of(v, offsets, b),
          tokens_of(out, b), log_sum.narrow(0, b, 1).transpose(1, 2), 0.0, false, {}, scale);
      to_q.copy_(from_q);
      to_k.copy_(from_k);
      to_v.copy_(from_v);
    }
    mark.outputs(grad_q, grad_k, grad_v);
    const at::ScalarType dtype = saved[0].scalar_type();
    return {grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), at::Tensor(), at::Tensor()};
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
         fmt::join(offsets, ", "));
}

}  // namespace

at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale) {
  check_ragged(q, k, v, offsets);
  const bool serves = (q.is_cpu() || q.is_meta()) && is_kernel_dtype(q.scalar_type()) && q.numel() > 0;
  return serves ? RaggedAttention::apply(q, k, v, offsets, scale)
                : reference::ragged_attention(q, k, v, offsets, scale);
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
        at::matmul(tokens_of(q, b).to(math), rows_of(k, offsets, b).to(math).transpose(-2, -1)) * scale;
    const at::Tensor attended = at::matmul(at::softmax(scores, -1), rows_of(v, offsets, b).to(math));
    samples.push_back(attended.transpose(1, 2).flatten(2).to(dtype));
  }
  return samples.empty() ? q.flatten(2) : at::cat(samples);
}

}  // namespace reference
}  // namespace kiln::ops
