#include "models/text/text_layers.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace kiln::text {
namespace {

constexpr double kInitStd = 0.02;

at::Tensor gelu_erf(const at::Tensor& x) { return at::gelu(x); }
at::Tensor quick_gelu(const at::Tensor& x) { return x * (x * 1.702).sigmoid(); }
at::Tensor rectified(const at::Tensor& x) { return at::threshold(x, 0, 0); }  // at::relu has no Meta kernel
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }

struct NamedActivation {
  const char* name;
  Activation function;
};
constexpr NamedActivation kActivations[] = {
    {"gelu", gelu_erf},         {"gelu_new", ops::gelu_tanh}, {"gelu_pytorch_tanh", ops::gelu_tanh},
    {"quick_gelu", quick_gelu}, {"relu", rectified},          {"silu", silu}};

// Consecutive texts of the same length.
struct Run {
  int64_t first_row, num_texts, length;
};

std::vector<Run> runs_of(const TokenRows& tokens) {
  std::vector<Run> runs;
  for (size_t b = 1; b < tokens.host_offsets.size(); ++b) {
    const int64_t begin = tokens.host_offsets[b - 1], length = tokens.host_offsets[b] - begin;
    if (!runs.empty() && runs.back().length == length)
      ++runs.back().num_texts;
    else
      runs.push_back({begin, 1, length});
  }
  return runs;
}

// Returns a mask, true for the keys that a run's tokens may not see: (n or 1, 1, L, p + L) or (n, 1, 1, p +
// L). It is undefined if they see all.
at::Tensor hidden_keys(const Run& run, const TokenRows& tokens, const AttentionOptions& options) {
  const int64_t past = options.past_keys.defined() ? options.past_keys.size(0) : 0;
  at::Tensor hidden;
  if (tokens.counts.defined())
    hidden = tokens.counts.narrow(0, run.first_row, run.num_texts * run.length)
                 .eq(0)
                 .view({run.num_texts, 1, 1, run.length});
  if (hidden.defined() && past > 0)
    hidden = at::cat({at::zeros({run.num_texts, 1, 1, past}, hidden.options()), hidden}, -1);
  if (!options.causal) return hidden;
  const int64_t all = past + run.length;
  const at::Tensor index = at::arange(all, tokens.ids.options());
  const at::Tensor distance =
      index.narrow(0, past, run.length).unsqueeze(1) - index;  // (L, p + L), query - key
  at::Tensor out_of_sight = distance < 0;
  if (options.window > 0 && options.window < all) out_of_sight = out_of_sight | (distance >= options.window);
  out_of_sight = out_of_sight.view({1, 1, run.length, all});
  return hidden.defined() ? hidden | out_of_sight : out_of_sight;
}

// Returns the f32 mask that is added to scores. It has the least number instead of -inf, so that a token that
// may see none sees all with equal weight.
at::Tensor added_mask(const at::Tensor& hidden, const at::Tensor& bias) {
  if (!hidden.defined()) return bias;
  const at::Tensor mask = at::zeros(hidden.sizes(), hidden.options().dtype(at::kFloat))
                              .masked_fill(hidden, std::numeric_limits<float>::lowest());
  return bias.defined() ? mask + bias : mask;
}

at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, const AttentionOptions& options) {
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)).to(at::kFloat);
  scores.mul_(options.scale / options.soft_cap).tanh_().mul_(options.soft_cap);
  if (mask.defined()) scores.add_(mask);
  return at::matmul(at::softmax(scores, -1).to(q.scalar_type()), v);
}

at::Tensor run_attention(const Run& run, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const TokenRows& tokens, const AttentionOptions& options) {
  const at::ScalarType dtype = ops::product_dtype(q.device(), q.scalar_type());
  const auto heads_of = [&](const at::Tensor& rows) {  // (n, H, L, d)
    return rows.narrow(0, run.first_row, run.num_texts * run.length)
        .view({run.num_texts, run.length, rows.size(1), rows.size(2)})
        .transpose(1, 2)
        .to(dtype);
  };
  const auto shared_heads_of = [&](const at::Tensor& rows, const at::Tensor& past) {
    const int64_t share = q.size(1) / rows.size(1);
    at::Tensor heads = heads_of(rows);
    if (past.defined()) {
      const at::Tensor before = past.to(dtype).transpose(0, 1).unsqueeze(0);  // (1, H, p, d)
      heads = at::cat({before.expand({run.num_texts, -1, -1, -1}), heads}, 2);
    }
    return share == 1 ? heads : heads.repeat_interleave(share, 1);
  };
  const at::Tensor queries = heads_of(q), keys = shared_heads_of(k, options.past_keys),
                   values = shared_heads_of(v, options.past_values);
  const at::Tensor bias = options.bias.defined()
                              ? options.bias.narrow(1, 0, run.length).narrow(2, 0, run.length).unsqueeze(0)
                              : at::Tensor();
  const at::Tensor mask = added_mask(hidden_keys(run, tokens, options), bias);
  const std::vector<int64_t> shape{run.num_texts, q.size(1), run.length, keys.size(2)};
  const at::Tensor out =
      options.soft_cap > 0 ? capped_attention(queries, keys, values, mask, options)
                           : ops::fused_attention(queries, keys, values,
                                                  mask.defined() ? mask.expand(shape) : mask, options.scale);
  return out.to(q.scalar_type()).transpose(1, 2).reshape({run.num_texts * run.length, q.size(1) * q.size(2)});
}

// attention() for tokens that see all of their text. Uses the fused operation, which has no mask.
at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const TokenRows& tokens, double scale) {
  const at::Tensor packed = at::stack({q, k, v}, 1);  // (T, 3, H, d)
  std::vector<at::Tensor> outputs;
  for (const Run& run : runs_of(tokens)) {
    const at::Tensor rows = packed.narrow(0, run.first_row, run.num_texts * run.length);
    outputs.push_back(
        ops::packed_attention(rows.view({run.num_texts, run.length, 3, q.size(1), q.size(2)}), scale)
            .flatten(0, 1));
  }
  return outputs.size() == 1 ? outputs.front() : at::cat(outputs);
}

}  // namespace

at::Tensor LayerNorm::forward(const at::Tensor& x) const {
  return ops::layer_norm(x.to(at::kFloat), weight->value, bias->value, eps, at::kFloat);
}

LayerNorm layer_norm(const ParameterScope& scope, const std::string& name, int64_t width, double eps) {
  return {.weight = scope.add(name + ".weight", {width}, Init::ones()),
          .bias = scope.add(name + ".bias", {width}, Init::zeros()),
          .eps = eps};
}

at::Tensor RmsNorm::forward(const at::Tensor& x) const {
  const at::Tensor scale = weight->value.to(at::kFloat);
  return ops::rms_norm(x.to(at::kFloat), offset == 0 ? scale : scale + offset, /*bias=*/{}, eps);
}

RmsNorm rms_norm(const ParameterScope& scope, const std::string& name, int64_t width, double eps,
                 double offset) {
  return {.weight = scope.add(name + ".weight", {width}, offset == 0 ? Init::ones() : Init::zeros()),
          .eps = eps,
          .offset = offset};
}

Linear linear_without_bias(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out) {
  return {.weight = scope.add(name + ".weight", {out, in}, Init::normal(kInitStd)), .bias = nullptr};
}

Linear linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out) {
  return scope.linear(name, in, out, Init::normal(kInitStd));
}

std::shared_ptr<Parameter> embedding(const ParameterScope& scope, const std::string& name, int64_t rows,
                                     int64_t width) {
  return scope.add(name + ".weight", {rows, width}, Init::normal(kInitStd));
}

Activation parse_activation(const std::string& who, const std::string& name) {
  std::string known;
  for (const NamedActivation& activation : kActivations) {
    if (name == activation.name) return activation.function;
    known += (known.empty() ? "" : ", ") + std::string(activation.name);
  }
  fail(who, "unknown activation {:?}; known are {}", name, known);
}

at::Tensor token_positions(const TokenRows& tokens) {
  std::vector<int64_t> positions(static_cast<size_t>(tokens.host_offsets.back()));
  for (size_t b = 1; b < tokens.host_offsets.size(); ++b)
    for (int64_t row = tokens.host_offsets[b - 1]; row < tokens.host_offsets[b]; ++row)
      positions[row] = row - tokens.host_offsets[b - 1];
  return ops::on_device(at::tensor(positions, at::kLong), tokens.ids.device());
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const TokenRows& tokens,
                     const AttentionOptions& options) {
  const std::vector<Run> runs = runs_of(tokens);
  std::vector<at::Tensor> outputs;
  outputs.reserve(runs.size());
  for (const Run& run : runs) outputs.push_back(run_attention(run, q, k, v, tokens, options));
  return outputs.size() == 1 ? outputs.front() : at::cat(outputs);
}

at::Tensor as_input(const at::Tensor& x, at::ScalarType compute_dtype) {
  return x.requires_grad() ? x : x.to(compute_dtype);
}

at::Tensor SelfAttention::forward(const at::Tensor& x, const TokenRows& tokens, int64_t num_heads,
                                  bool causal, at::ScalarType compute_dtype) const {
  const int64_t head_dim = x.size(1) / num_heads;
  const at::Tensor in = as_input(x, compute_dtype);
  const auto heads = [&](const Linear& projection) {
    return projection.forward(in, compute_dtype).view({x.size(0), num_heads, head_dim});
  };
  const at::Tensor q = heads(query), k = heads(key), v = heads(value);
  const AttentionOptions options{.scale = 1 / std::sqrt(static_cast<double>(head_dim)), .causal = causal};
  const bool sees_all = !causal && !tokens.counts.defined();
  return out.forward(
      sees_all ? whole_attention(q, k, v, tokens, options.scale) : attention(q, k, v, tokens, options),
      compute_dtype);
}

TableEmbed::TableEmbed(const std::string& table, int64_t rows, int64_t width, const BuildOptions& options,
                       double scale)
    : table_(embedding(ParameterScope(parameters_, options), table, rows, width)), scale_(scale) {
  name_ = "embed";
}

State TableEmbed::forward(const State&, const ModelInput& input) const {
  const at::Tensor rows = ops::embedding_rows(table_->value, input.tokens.ids);
  return {.hidden = scale_ == 1 ? rows : rows * scale_};
}

}  // namespace kiln::text
