#include "models/text/encoders.h"

#include <utility>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "models/text/text_layers.h"
#include "ops/ops.h"

namespace kiln {
namespace {

struct BertConfig {
  int64_t vocabulary_size, width, depth, num_heads, ff_width, max_positions, num_types;
  double eps;
  text::Activation activation;
};

BertConfig parse_bert_config(const nlohmann::json& json) {
  const JsonConfig config("bert", json);
  config.refuse("is_decoder", false);
  config.choice("position_embedding_type", "absolute", {"absolute"});
  const BertConfig result{
      .vocabulary_size = config.positive("vocab_size", 30522),
      .width = config.positive("hidden_size", 768),
      .depth = config.positive("num_hidden_layers", 12),
      .num_heads = config.positive("num_attention_heads", 12),
      .ff_width = config.positive("intermediate_size", 3072),
      .max_positions = config.positive("max_position_embeddings", 512),
      .num_types = config.positive("type_vocab_size", 2),
      .eps = config.get("layer_norm_eps", 1e-12),
      .activation = text::parse_activation("bert", config.get<std::string>("hidden_act", "gelu"))};
  if (result.width % result.num_heads != 0)
    fail("bert", "expected a hidden_size that num_attention_heads {} divides, got {}", result.num_heads,
         result.width);
  return result;
}

class BertEmbed : public Segment {
 public:
  BertEmbed(const BertConfig& config, const BuildOptions& options) : num_types_(config.num_types) {
    name_ = "embed";
    const ParameterScope scope = ParameterScope(parameters_, options).under("embeddings");
    words_ = text::embedding(scope, "word_embeddings", config.vocabulary_size, config.width);
    positions_ = text::embedding(scope, "position_embeddings", config.max_positions, config.width);
    types_ = text::embedding(scope, "token_type_embeddings", config.num_types, config.width);
    norm_ = text::layer_norm(scope, "LayerNorm", config.width, config.eps);
  }

  State forward(const State&, const ModelInput& input) const override {
    const TokenRows& tokens = input.tokens;
    const bool is_given = tokens.types.defined();
    const at::Tensor types = is_given ? tokens.types : at::zeros_like(tokens.ids);
    const auto given = is_given ? range_of(types) : std::nullopt;
    if (given && (given->first < 0 || given->second >= num_types_))
      fail("bert", "expected token types in 0..{}, got {}..{}", num_types_ - 1, given->first, given->second);
    const at::Tensor sum = ops::embedding_rows(words_->value, tokens.ids) +
                           ops::embedding_rows(types_->value, types) +
                           ops::embedding_rows(positions_->value, text::token_positions(tokens));
    return {.hidden = norm_.forward(sum)};
  }

  const std::shared_ptr<Parameter>& table() const { return words_; }

 private:
  int64_t num_types_;
  std::shared_ptr<Parameter> words_, positions_, types_;
  text::LayerNorm norm_;
};

// A block whose norms follow the residual sums.
class BertBlock : public Segment {
 public:
  BertBlock(const BertConfig& config, int64_t index, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype), num_heads_(config.num_heads), activation_(config.activation) {
    name_ = "encoder.layer." + std::to_string(index);
    const ParameterScope scope(parameters_, options, name_ + ".");
    attention_.query = text::linear(scope, "attention.self.query", config.width, config.width);
    attention_.key = text::linear(scope, "attention.self.key", config.width, config.width);
    attention_.value = text::linear(scope, "attention.self.value", config.width, config.width);
    attention_.out = text::linear(scope, "attention.output.dense", config.width, config.width);
    attention_norm_ = text::layer_norm(scope, "attention.output.LayerNorm", config.width, config.eps);
    inner_ = text::linear(scope, "intermediate.dense", config.width, config.ff_width);
    out_ = text::linear(scope, "output.dense", config.ff_width, config.width);
    norm_ = text::layer_norm(scope, "output.LayerNorm", config.width, config.eps);
  }

  State forward(const State& state, const ModelInput& input) const override {
    const at::Tensor& x = state.hidden;  // (T, D) f32
    const at::Tensor attended =
        attention_.forward(x, input.tokens, num_heads_, /*causal=*/false, compute_dtype_);
    const at::Tensor y = attention_norm_.forward(attended + x);
    const at::Tensor inner = activation_(inner_.forward(y, compute_dtype_));
    return {.hidden = norm_.forward(out_.forward(inner, compute_dtype_) + y)};
  }

 private:
  at::ScalarType compute_dtype_;
  int64_t num_heads_;
  text::Activation activation_;
  text::SelfAttention attention_;
  Linear inner_, out_;
  text::LayerNorm attention_norm_, norm_;
};

class Bert : public TextEncoder {
 public:
  Bert(const BertConfig& config, const BuildOptions& options) {
    add_segments<BertBlock>(std::make_unique<BertEmbed>(config, options), config, options);
    shape_ = {.family = "bert",
              .width = config.width,
              .vocabulary_size = config.vocabulary_size,
              .max_tokens = config.max_positions};
  }

  at::Tensor pool(const at::Tensor& last_hidden, const TokenRows& tokens) const override {
    std::vector<at::Tensor> means;
    for (size_t b = 1; b < tokens.host_offsets.size(); ++b) {
      const int64_t begin = tokens.host_offsets[b - 1], length = tokens.host_offsets[b] - begin;
      const at::Tensor rows = last_hidden.narrow(0, begin, length);
      if (!tokens.counts.defined()) {
        means.push_back(rows.mean(0));
        continue;
      }
      const at::Tensor weights = tokens.counts.narrow(0, begin, length).to(at::kFloat).unsqueeze(1);
      means.push_back((rows * weights).sum(0) / weights.sum().clamp_min(kLeastSum));
    }
    const at::Tensor pooled = at::stack(means);
    return pooled /
           at::linalg_vector_norm(pooled, 2, at::IntArrayRef{1}, /*keepdim=*/true).clamp_min(kLeastNorm);
  }

 private:
  // The least divisors of sentence-transformers' pooling and of PyTorch's normalize().
  static constexpr double kLeastSum = 1e-9, kLeastNorm = 1e-12;
};

std::string with_current_norm_names(std::string key) {
  for (const auto& [old_name, name] :
       {std::pair<std::string, std::string>{"LayerNorm.gamma", "LayerNorm.weight"},
        {"LayerNorm.beta", "LayerNorm.bias"}})
    if (key.ends_with(old_name)) key.replace(key.size() - old_name.size(), old_name.size(), name);
  return key;
}

}  // namespace

std::unique_ptr<TextEncoder> build_bert(const nlohmann::json& config, const BuildOptions& options) {
  return std::make_unique<Bert>(parse_bert_config(config), options);
}

std::map<std::string, at::Tensor> bert_weights(const std::map<std::string, at::Tensor>& weights) {
  std::map<std::string, at::Tensor> kept;
  for (const auto& [published, value] : weights) {
    const std::string key = published.starts_with("bert.") ? published.substr(5) : published;
    if (key.starts_with("cls.") || key.starts_with("pooler.") || key.starts_with("classifier.") ||
        key == "embeddings.position_ids")
      continue;
    kept[with_current_norm_names(key)] = value;
  }
  return kept;
}

}  // namespace kiln
