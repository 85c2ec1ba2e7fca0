#include "models/denoisers/unet/unet_blocks.h"

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "ops/caption_attention.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr double kTransformerNormEps = 1e-6;  // of the group norm before a transformer
constexpr double kTokenNormEps = 1e-5;
constexpr int64_t kFeedForwardFactor = 4;

// (B, C, H, W) channels-last and (B, H * W, C) are the same memory.
at::Tensor to_tokens(const at::Tensor& x) { return x.permute({0, 2, 3, 1}).flatten(1, 2); }
at::Tensor to_features(const at::Tensor& tokens, int64_t height, int64_t width) {
  return tokens.view({tokens.size(0), height, width, tokens.size(2)}).permute({0, 3, 1, 2});
}

}  // namespace

at::Tensor equal_captions(const TextRows& text, int64_t batch, int64_t width) {
  if (!text.defined() || text.num_samples() != batch || text.rows.size(1) != width)
    fail("unet", "expected captions of {} samples, rows of width {}, got {}", batch, width,
         text.defined() ? fmt::format("{} and {}", text.num_samples(), text.rows.size(1)) : "none");
  const int64_t length = text.host_offsets[1] - text.host_offsets[0];
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t rows = text.host_offsets[b + 1] - text.host_offsets[b];
    if (rows != length)
      fail("unet", "expected captions of equal length (all 77 rows, padding included), got {} and {} rows",
           length, rows);
  }
  return text.rows.view({batch, length, width});
}

UnetResnet::UnetResnet(const UnetBuild& build, const ParameterScope& scope, int64_t in, int64_t out)
    : norm1(scope.group_norm("norm1", in, build.config.norm_num_groups, build.config.norm_eps)),
      norm2(scope.group_norm("norm2", out, build.config.norm_num_groups, build.config.norm_eps)),
      conv1(scope.conv2d("conv1", in, out, 3, 1, 1)),
      conv2(scope.conv2d("conv2", out, out, 3, 1, 1)),
      time_projection(scope.uniform_linear("time_emb_proj", build.config.time_width(), out)) {
  if (in != out) shortcut = scope.conv2d("conv_shortcut", in, out, 1);
}

at::Tensor UnetResnet::forward(const at::Tensor& x, const at::Tensor& time, at::ScalarType dtype) const {
  at::Tensor hidden = conv1.forward_normed(norm1, /*silu=*/true, x, dtype);
  hidden = hidden + time_projection.forward(time, dtype).unsqueeze(-1).unsqueeze(-1);
  hidden = conv2.forward_normed(norm2, /*silu=*/true, hidden, dtype);
  return (shortcut ? shortcut->forward(x, dtype) : x) + hidden;
}

UnetTransformerBlock::UnetTransformerBlock(const UnetBuild& build, const ParameterScope& scope,
                                           int64_t channels, int64_t heads)
    : num_heads(heads),
      norm1(scope.layer_norm("norm1", channels, kTokenNormEps)),
      norm2(scope.layer_norm("norm2", channels, kTokenNormEps)),
      norm3(scope.layer_norm("norm3", channels, kTokenNormEps)),
      self_q(scope.uniform_linear("attn1.to_q", channels, channels, /*has_bias=*/false)),
      self_k(scope.uniform_linear("attn1.to_k", channels, channels, /*has_bias=*/false)),
      self_v(scope.uniform_linear("attn1.to_v", channels, channels, /*has_bias=*/false)),
      self_out(scope.uniform_linear("attn1.to_out.0", channels, channels)),
      cross_q(scope.uniform_linear("attn2.to_q", channels, channels, /*has_bias=*/false)),
      cross_k(scope.uniform_linear("attn2.to_k", build.config.cross_attention_dim, channels, false)),
      cross_v(scope.uniform_linear("attn2.to_v", build.config.cross_attention_dim, channels, false)),
      cross_out(scope.uniform_linear("attn2.to_out.0", channels, channels)),
      gate(scope.uniform_linear("ff.net.0.proj", channels, 2 * kFeedForwardFactor * channels)),
      down(scope.uniform_linear("ff.net.2", kFeedForwardFactor * channels, channels)) {}

at::Tensor UnetTransformerBlock::forward(at::Tensor x, const at::Tensor& text, at::ScalarType dtype) const {
  x = x + self_attention(x, dtype);
  x = x + cross_attention(x, text, dtype);
  return x + down.forward_geglu(normed_linears(norm3, {&gate}, x, dtype), dtype);
}

at::Tensor UnetTransformerBlock::self_attention(const at::Tensor& x, at::ScalarType dtype) const {
  const int64_t head_dim = x.size(2) / num_heads;
  const at::Tensor qkv = normed_linears(norm1, {&self_q, &self_k, &self_v}, x, dtype)
                             .view({x.size(0), x.size(1), 3, num_heads, head_dim});
  return self_out.forward(ops::packed_attention(qkv, 1 / std::sqrt(static_cast<double>(head_dim))), dtype);
}

at::Tensor UnetTransformerBlock::cross_attention(const at::Tensor& x, const at::Tensor& text,
                                                 at::ScalarType dtype) const {
  const int64_t head_dim = x.size(2) / num_heads;
  const auto heads = [&](const at::Tensor& rows) {  // (B, rows, heads, head_dim)
    return rows.view({rows.size(0), rows.size(1), num_heads, head_dim});
  };
  const at::Tensor attended = ops::cross_attention(
      heads(normed_linears(norm2, {&cross_q}, x, dtype)), heads(cross_k.forward(text, dtype)),
      heads(cross_v.forward(text, dtype)), 1 / std::sqrt(static_cast<double>(head_dim)));
  return cross_out.forward(attended, dtype);
}

UnetTransformer::UnetTransformer(const UnetBuild& build, const ParameterScope& scope, int64_t channels,
                                 int64_t num_heads, int64_t num_blocks)
    : norm(scope.group_norm("norm", channels, build.config.norm_num_groups, kTransformerNormEps)) {
  if (build.config.use_linear_projection) {
    linear_in = scope.uniform_linear("proj_in", channels, channels);
    linear_out = scope.uniform_linear("proj_out", channels, channels);
  } else {
    conv_in = scope.conv2d("proj_in", channels, channels, 1);
    conv_out = scope.conv2d("proj_out", channels, channels, 1);
  }
  for (int64_t i = 0; i < num_blocks; ++i)
    blocks.emplace_back(build, scope.under("transformer_blocks." + std::to_string(i)), channels, num_heads);
}

at::Tensor UnetTransformer::forward(const at::Tensor& x, const at::Tensor& text, at::ScalarType dtype) const {
  const int64_t height = x.size(2), width = x.size(3);
  at::Tensor tokens = conv_in ? to_tokens(conv_in->forward_normed(norm, /*silu=*/false, x, dtype))
                              : linear_in->forward(to_tokens(norm.forward(x, /*silu=*/false)), dtype);
  for (const UnetTransformerBlock& block : blocks) tokens = block.forward(tokens, text, dtype);
  const at::Tensor out = conv_out ? conv_out->forward(to_features(tokens.contiguous(), height, width), dtype)
                                  : to_features(linear_out->forward(tokens, dtype), height, width);
  return x + out;
}

}  // namespace kiln
