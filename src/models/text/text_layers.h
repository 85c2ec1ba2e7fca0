// Layers that text encoders share: norms, activations, and attention among the tokens of each text.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/model.h"
#include "models/parts/layers.h"

namespace kiln::text {

// Layer norm with weight and bias over the last dimension. Statistics and result are f32.
struct LayerNorm {
  std::shared_ptr<Parameter> weight, bias;  // (D)
  double eps = 0;

  at::Tensor forward(const at::Tensor& x) const;
};
LayerNorm layer_norm(const ParameterScope& scope, const std::string& name, int64_t width, double eps);

// x / sqrt(mean(x^2) + eps) * (offset + weight), in f32.
struct RmsNorm {
  std::shared_ptr<Parameter> weight;  // (D)
  double eps = 0, offset = 0;

  at::Tensor forward(const at::Tensor& x) const;
};
RmsNorm rms_norm(const ParameterScope& scope, const std::string& name, int64_t width, double eps,
                 double offset = 0);

Linear linear_without_bias(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out);
Linear linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out);
std::shared_ptr<Parameter> embedding(const ParameterScope& scope, const std::string& name, int64_t rows,
                                     int64_t width);

using Activation = at::Tensor (*)(const at::Tensor&);
// Finds an activation by transformers' name: gelu, gelu_new, gelu_pytorch_tanh, quick_gelu, relu, silu.
// Throws Error naming `who` and the known ones.
Activation parse_activation(const std::string& who, const std::string& name);

// Returns the position of each token in its text, (T) i64.
at::Tensor token_positions(const TokenRows& tokens);

struct AttentionOptions {
  double scale = 1;
  bool causal = false;
  int64_t window = 0;   // a token sees only tokens less than this before it; 0: all
  double soft_cap = 0;  // if > 0, scores become cap * tanh(score / cap)
  // Keys and values (p, H / n, d) of p tokens that precede every text and are seen by its tokens; or
  // undefined.
  at::Tensor past_keys{}, past_values{};
  at::Tensor bias{};  // (H, L, L) f32, added to scores; L is at least the longest text; or undefined
};

// Computes softmax(q k^T * scale + bias) v within each text. q (T, H, d); k, v (T, H / n, d), shared by n
// heads of q each -> (T, H * d) in the dtype of q. No token sees those that TokenRows::counts leaves out; a
// token that may see none sees all with equal weight. REQUIRES: no bias together with past keys.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const TokenRows& tokens,
                     const AttentionOptions& options);

// Casts x to the compute dtype once for several linear layers. Leaves x as it is if it needs a gradient,
// because the layers' gradients add up in the dtype of x.
at::Tensor as_input(const at::Tensor& x, at::ScalarType compute_dtype);

// Self-attention of x (T, D) -> (T, D), with as many heads of keys as of queries.
struct SelfAttention {
  Linear query, key, value, out;
  at::Tensor forward(const at::Tensor& x, const TokenRows& tokens, int64_t num_heads, bool causal,
                     at::ScalarType compute_dtype) const;
};

// The first segment of an encoder that only looks ids up in a table, and multiplies the rows by `scale`.
class TableEmbed : public Segment {
 public:
  TableEmbed(const std::string& table, int64_t rows, int64_t width, const BuildOptions& options,
             double scale = 1);
  State forward(const State&, const ModelInput& input) const override;
  const std::shared_ptr<Parameter>& table() const { return table_; }

 private:
  std::shared_ptr<Parameter> table_;
  double scale_;
};

// The last segment of an encoder: the norm that `make`, layer_norm or rms_norm, makes of the further
// arguments.
template <class Norm>
class FinalNorm : public Segment {
 public:
  template <class Make, class... Arguments>
  FinalNorm(const Make& make, const BuildOptions& options, const Arguments&... arguments)
      : norm_(make(ParameterScope(parameters_, options), arguments...)) {
    name_ = "final";
  }
  State forward(const State& state, const ModelInput&) const override {
    return {.hidden = norm_.forward(state.hidden)};
  }

 private:
  Norm norm_;
};

}  // namespace kiln::text
