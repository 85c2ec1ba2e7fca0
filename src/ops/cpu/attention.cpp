// The operations of attention on a CPU.
#include "ops/attention.h"

#include <ATen/Parallel.h>

#include "core/aten.h"
#include "ops/caption_attention.h"
#include "ops/cpu/attention_heads.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"
#include "ops/planned/planned.h"

namespace kiln::ops::cpu {
namespace {

// qkv (B, N, 3, H, d).
AttentionHeads packed_heads(const at::Tensor& qkv, double scale) {
  return {.q = qkv.select(2, 0), .k = qkv.select(2, 1), .v = qkv.select(2, 2), .offsets = {}, .scale = scale};
}

// The heads in the dtype that is computed in.
AttentionHeads computed(AttentionHeads heads) {
  const at::ScalarType dtype = computing_dtype(heads);
  heads.q = heads.q.to(dtype), heads.k = heads.k.to(dtype), heads.v = heads.v.to(dtype);
  return heads;
}

// Both results, undefined in content.
AttentionResult results_for(const at::Tensor& q) {
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)),
          {},
          {}};
}

// Sums the pieces (pieces, T, H, d) of a gradient of rows.
void sum_pieces(const at::Tensor& pieces, const at::Tensor& sum) {
  const int64_t width = sum.size(1) * sum.size(2);
  kLoop.on(sum)(sum.size(0), at::divup(16384, width), [&](int64_t begin, int64_t end) {
    sum_partials(pieces.const_data_ptr<float>() + begin * width, static_cast<size_t>(pieces.size(0)),
                 static_cast<size_t>(sum.numel()),
                 static_cast<char*>(sum.data_ptr()) + begin * width * sum.element_size(),
                 from_scalar_type(sum.scalar_type()), static_cast<size_t>((end - begin) * width));
  });
}

}  // namespace

at::ScalarType attention_dtype(const at::Tensor& qkv) { return computing_dtype(packed_heads(qkv, 1)); }

AttentionEngine attention_engine(const at::Tensor& qkv, double) {
  return is_kernel_dtype(qkv.scalar_type()) ? AttentionEngine::kCpu : AttentionEngine::kNone;
}

AttentionResult attention(const at::Tensor& stored, double scale, AttentionEngine) {
  const at::Tensor qkv = stored.to(attention_dtype(stored));
  const AttentionHeads heads = packed_heads(qkv, scale);
  const AttentionResult result = results_for(heads.q);
  attend(heads, result.out, result.log_sum);
  return {result.out.flatten(2).to(stored.scalar_type()), result.log_sum, {}, {}};
}

AttentionGrads attention_backward(const at::Tensor& grad_stored, const at::Tensor& stored,
                                  const AttentionResult& result, const AttentionPass& pass) {
  const at::ScalarType dtype = attention_dtype(stored);
  const at::Tensor qkv = stored.to(dtype), grads = at::empty_like(qkv);
  const AttentionHeads heads = packed_heads(qkv, pass.scale), to = packed_heads(grads, pass.scale);
  const auto of_heads = [&](const at::Tensor& rows) { return rows.to(dtype).view(heads.q.sizes()); };
  attend_backward(heads, of_heads(result.out), result.log_sum, of_heads(grad_stored), {to.q, to.k, to.v});
  return {.packed = grads.to(stored.scalar_type()), .q = {}, .k = {}, .v = {}};
}

AttentionResult ragged_attention(const AttentionRows& rows) {
  const AttentionHeads heads = computed({rows.q, rows.k, rows.v, rows.offsets, rows.scale});
  const AttentionResult result = results_for(heads.q);
  attend(heads, result.out, result.log_sum);
  return {result.out.to(rows.q.scalar_type()), result.log_sum, {}, {}};
}

AttentionGrads ragged_attention_backward(const at::Tensor& grad_out, const AttentionRows& rows,
                                         const AttentionResult& result) {
  const AttentionHeads heads = computed({rows.q, rows.k, rows.v, rows.offsets, rows.scale});
  const at::ScalarType dtype = heads.q.scalar_type();
  const auto like = [](const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
  const at::Tensor grad_q = like(heads.q), grad_k = like(heads.k), grad_v = like(heads.v);
  HeadGrads grads{grad_q, grad_k, grad_v, pieces_of_queries(heads.q)};
  if (grads.pieces > 1) {
    const std::vector<int64_t> sizes = {grads.pieces, grad_k.size(0), grad_k.size(1), grad_k.size(2)};
    grads.k = at::empty(sizes, grad_k.options().dtype(at::kFloat));
    grads.v = at::empty(sizes, grads.k.options());
  }
  attend_backward(heads, result.out.to(dtype), result.log_sum, grad_out.to(dtype), grads);
  if (grads.pieces > 1) {
    sum_pieces(grads.k, grad_k);
    sum_pieces(grads.v, grad_v);
  }
  zero_unowned(grad_k, rows.offsets);
  zero_unowned(grad_v, rows.offsets);
  const at::ScalarType stored = rows.q.scalar_type();
  return {.packed = {}, .q = grad_q.to(stored), .k = grad_k.to(stored), .v = grad_v.to(stored)};
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const auto tokens = [](const at::Tensor& heads) { return unit_last(heads).transpose(1, 2); };
  const AttentionHeads heads{.q = tokens(q),
                             .k = tokens(k),
                             .v = tokens(v),
                             .offsets = {},
                             .scale = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
                             .mask = mask ? unit_last(*mask) : at::Tensor()};
  const AttentionResult result = results_for(heads.q);
  attend(heads, result.out, result.log_sum);
  return result.out.transpose(1, 2);
}

bool serves_fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const std::optional<at::Tensor>& mask) {
  const auto wants_gradient = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  const bool is_forward =
      !at::GradMode::is_enabled() ||
      !(wants_gradient(q) || wants_gradient(k) || wants_gradient(v) || (mask && wants_gradient(*mask)));
  // Each thread packs all keys of a head: beyond this the caches do not hold them, and ATen goes block by
  // block.
  constexpr int64_t kMostElements = 1 << 20;
  return is_forward && q.numel() > 0 && k.numel() > 0 && k.size(2) * k.size(3) <= kMostElements &&
         (q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16) &&
         (!mask || mask->scalar_type() == at::kFloat) &&
         serves_mask({.q = q.transpose(1, 2), .k = k.transpose(1, 2), .v = v, .offsets = {}, .scale = 1});
}

}  // namespace kiln::ops::cpu
