// ATen's fused attention kernels of CUDA, emulated on CPU tensors: what a kernel leaves unwritten is NaN, and
// what it refuses is refused.
#include <ATen/ops/logsumexp.h>
#include <torch/library.h>

#include <functional>
#include <limits>

#include "core/aten.h"

namespace kiln::emulation {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor poisoned(at::IntArrayRef sizes, const Tensor& like) {
  return at::full(sizes, std::numeric_limits<double>::quiet_NaN(), like.options());
}

// Sample b's tokens (N, H, d), heads first and in f64.
struct Cut {
  const int32_t* offsets;
  explicit Cut(const Tensor& tensor) : offsets(tensor.const_data_ptr<int32_t>()) {
    TORCH_CHECK(tensor.scalar_type() == at::kInt && tensor.is_contiguous() && tensor.dim() == 1);
  }
  int64_t size(int64_t b) const { return offsets[b + 1] - offsets[b]; }
  Tensor of(const Tensor& tokens, int64_t b) const { return tokens.narrow(0, offsets[b], size(b)); }
  Tensor heads(const Tensor& tokens, int64_t b) const {
    return of(tokens, b).transpose(0, 1).to(at::kDouble);
  }
};

// How a kernel lays out the sums of sample b: (H, N).
using SumsOf = std::function<Tensor(const Tensor& log_sum, int64_t b)>;

struct Problem {
  Tensor q, k, v;  // (T, H, d)
  Cut q_cut, k_cut;
  int64_t batch;
  double scale;
  SumsOf sums_of;
  bool writes_empty;  // the result and the gradient of queries that have no rows

  void forward(const Tensor& out, const Tensor& log_sum) const {
    for (int64_t b = 0; b < batch; ++b) {
      if (k_cut.size(b) == 0) {
        if (writes_empty) q_cut.of(out, b).zero_();
        continue;
      }
      const Tensor scores = at::matmul(q_cut.heads(q, b), k_cut.heads(k, b).transpose(1, 2)) * scale;
      sums_of(log_sum, b).copy_(scores.logsumexp(-1));
      q_cut.of(out, b).copy_(at::matmul(scores.softmax(-1), k_cut.heads(v, b)).transpose(0, 1));
    }
  }

  // From what forward left, not from what it could make again.
  std::array<Tensor, 3> backward(const Tensor& grad, const Tensor& out, const Tensor& log_sum) const {
    const std::array<Tensor, 3> grads{poisoned(q.sizes(), q), poisoned(k.sizes(), k), poisoned(v.sizes(), v)};
    for (int64_t b = 0; b < batch; ++b) {
      if (k_cut.size(b) == 0) {
        if (writes_empty) q_cut.of(grads[0], b).zero_();
        continue;
      }
      const Tensor from_q = q_cut.heads(q, b), from_k = k_cut.heads(k, b), from_grad = q_cut.heads(grad, b);
      const Tensor weights = (at::matmul(from_q, from_k.transpose(1, 2)) * scale -
                              sums_of(log_sum, b).to(at::kDouble).unsqueeze(-1))
                                 .exp();
      const Tensor delta = (from_grad * q_cut.heads(out, b)).sum(-1, /*keepdim=*/true);
      const Tensor to_scores =
          weights * (at::matmul(from_grad, k_cut.heads(v, b).transpose(1, 2)) - delta) * scale;
      q_cut.of(grads[0], b).copy_(at::matmul(to_scores, from_k).transpose(0, 1));
      k_cut.of(grads[1], b).copy_(at::matmul(to_scores.transpose(1, 2), from_q).transpose(0, 1));
      k_cut.of(grads[2], b).copy_(at::matmul(weights.transpose(1, 2), from_grad).transpose(0, 1));
    }
    return grads;
  }
};

// The checks of mha_varlen_fwd and mha_varlen_bwd (flash_attn/flash_api.cpp).
Problem flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_offsets,
              const Tensor& k_offsets, int64_t most_queries, int64_t most_rows, double scale) {
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16);
  TORCH_CHECK(q.dim() == 3 && q.size(2) % 8 == 0 && q.size(2) <= 256);
  for (const Tensor& tokens : {q, k, v}) TORCH_CHECK(tokens.stride(-1) == 1);
  const Cut k_cut(k_offsets), q_cut(q_offsets);
  const int64_t batch = q_offsets.numel() - 1;
  TORCH_CHECK(k_offsets.numel() == batch + 1 && batch > 0 && most_rows > 0);
  for (int64_t b = 0; b < batch; ++b)
    TORCH_CHECK(q_cut.size(b) <= most_queries && k_cut.size(b) <= most_rows);
  const SumsOf sums_of = [q_cut](const Tensor& log_sum, int64_t b) {
    return log_sum.narrow(1, q_cut.offsets[b], q_cut.size(b));  // (H, all queries)
  };
  return {q, k, v, q_cut, k_cut, batch, scale, sums_of, /*writes_empty=*/true};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_offsets,
    const OptionalTensor& k_offsets, int64_t most_queries, int64_t most_rows, double dropout, bool is_causal,
    bool wants_mask, std::optional<double> scale, std::optional<int64_t>, std::optional<int64_t>,
    const OptionalTensor&, const OptionalTensor&) {
  TORCH_CHECK(dropout == 0 && !is_causal && !wants_mask);
  const Tensor out = poisoned(q.sizes(), q),
               log_sum = at::full({q.size(1), q.size(0)}, std::numeric_limits<float>::infinity());
  flash(q, k, v, *q_offsets, *k_offsets, most_queries, most_rows, *scale).forward(out, log_sum);
  const auto state = at::TensorOptions().dtype(at::kUInt64);
  return {out, log_sum, at::empty({2}, state), at::empty({}, state), {}};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& out, const Tensor& log_sum,
                                                  const Tensor& q_offsets, const Tensor& k_offsets,
                                                  int64_t most_queries, int64_t most_rows, double, bool,
                                                  const Tensor& random_state, const Tensor&,
                                                  std::optional<double> scale, std::optional<int64_t>,
                                                  std::optional<int64_t>) {
  TORCH_CHECK(random_state.scalar_type() == at::kUInt64 && grad.scalar_type() == q.scalar_type());
  const auto [to_q, to_k, to_v] = flash(q, k, v, q_offsets, k_offsets, most_queries, most_rows, *scale)
                                      .backward(grad.contiguous(), out.contiguous(), log_sum);
  return {to_q, to_k, to_v};
}

constexpr int64_t kSumPadding = 32;  // Kernel::kAlignLSE

// The checks of _efficient_attention_forward and _backward (cuda/attention.cu, attention_backward.cu).
Problem efficient(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_offsets,
                  const Tensor& k_offsets, int64_t most_queries, int64_t most_rows, double scale) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == 1 && k.size(0) == 1);
  for (const Tensor& tokens : {q, k, v})
    TORCH_CHECK(tokens.stride(-1) == 1 && tokens.stride(2) % 4 == 0 && tokens.stride(1) % 4 == 0);
  TORCH_CHECK(most_queries > 0 && most_queries <= q.size(1) && most_rows > 0 && most_rows <= k.size(1));
  const Cut k_cut(k_offsets), q_cut(q_offsets);
  const SumsOf sums_of = [q_cut](const Tensor& log_sum, int64_t b) {
    return log_sum.select(0, b).narrow(1, 0, q_cut.size(b));  // (B, H, padded queries)
  };
  return {q.squeeze(0), k.squeeze(0), v.squeeze(0),          q_cut, k_cut, q_offsets.numel() - 1,
          scale,        sums_of,      /*writes_empty=*/false};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
    const OptionalTensor& q_offsets, const OptionalTensor& k_offsets,
    std::optional<c10::SymInt> symbolic_queries, std::optional<c10::SymInt> symbolic_rows, double,
    int64_t mask_type, bool wants_sums, std::optional<double> scale, const OptionalTensor&,
    std::optional<int64_t>) {
  TORCH_CHECK(!bias && mask_type == 0 && wants_sums);
  const int64_t most_queries = symbolic_queries->expect_int(), most_rows = symbolic_rows->expect_int();
  const int64_t padded = (most_queries + kSumPadding - 1) / kSumPadding * kSumPadding;
  const Tensor out = poisoned(q.sizes(), q), log_sum = at::full({q_offsets->numel() - 1, q.size(2), padded},
                                                                std::numeric_limits<float>::quiet_NaN());
  efficient(q, k, v, *q_offsets, *k_offsets, most_queries, most_rows, *scale)
      .forward(out.squeeze(0), log_sum);
  const Tensor state = at::empty({}, at::kLong);
  return {out, log_sum, state, state.clone(), most_queries, most_rows};
}

// Samples of equal length (B, N, H, d) as one batch entry with offsets.
struct EqualSamples {
  Tensor offsets;
  explicit EqualSamples(const Tensor& q)
      : offsets(at::arange(0, q.size(0) * q.size(1) + 1, q.size(1), at::TensorOptions(at::kInt))) {}
  static Tensor joined(const Tensor& tokens) { return tokens.flatten(0, 1).unsqueeze(0); }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
    const Tensor& out, const OptionalTensor& q_offsets, const OptionalTensor& k_offsets, int64_t most_queries,
    int64_t most_rows, const Tensor& log_sum, double dropout, const Tensor& seed, const Tensor& offset,
    int64_t mask_type, bool bias_grad, std::optional<double> scale, std::optional<int64_t> splits,
    std::optional<int64_t> window, bool shares_storage) {
  if (!q_offsets) {
    const EqualSamples samples(q);
    const auto joined = &EqualSamples::joined;
    const auto [to_q, to_k, to_v, none] = efficient_backward(
        joined(grad), joined(q), joined(k), joined(v), bias, joined(out), samples.offsets, samples.offsets,
        most_queries, most_rows, log_sum, dropout, seed, offset, mask_type, bias_grad, scale, splits, window,
        /*shares_storage=*/false);
    const auto apart = [&](const Tensor& tokens) { return tokens.view(q.sizes()); };
    if (!shares_storage) return {apart(to_q), apart(to_k), apart(to_v), none};
    const Tensor together = at::stack({apart(to_q), apart(to_k), apart(to_v)}, 2);
    return {together.select(2, 0), together.select(2, 1), together.select(2, 2), none};
  }
  const auto [to_q, to_k, to_v] = efficient(q, k, v, *q_offsets, *k_offsets, most_queries, most_rows, *scale)
                                      .backward(grad.contiguous().squeeze(0), out.squeeze(0), log_sum);
  return {to_q.unsqueeze(0), to_k.unsqueeze(0), to_v.unsqueeze(0), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_flash_attention_forward", flash_forward);
  library.impl("_flash_attention_backward", flash_backward);
  library.impl("_efficient_attention_forward", efficient_forward);
  library.impl("_efficient_attention_backward", efficient_backward);
}

}  // namespace
}  // namespace kiln::emulation
