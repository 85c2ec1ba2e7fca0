#include "models/text/encoders.h"

#include <array>
#include <string_view>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "models/text/text_layers.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr std::string_view kClipPrefix = "text_model.";
constexpr int64_t kWrongEosId = 2;  // in configs written before transformers' change 24773

struct ClipTextConfig {
  int64_t vocabulary_size, width, ff_width, depth, num_heads, max_positions, eos_id;
  double eps;
  text::Activation activation;
};

ClipTextConfig parse_clip_text_config(const nlohmann::json& json) {
  const JsonConfig whole("clip_text", json);
  const nlohmann::json own = whole.has("text_config") ? whole.object("text_config") : json;
  const JsonConfig config("clip_text", own);
  const ClipTextConfig result{
      .vocabulary_size = config.positive("vocab_size", 49408),
      .width = config.positive("hidden_size", 512),
      .ff_width = config.positive("intermediate_size", 2048),
      .depth = config.positive("num_hidden_layers", 12),
      .num_heads = config.positive("num_attention_heads", 8),
      .max_positions = config.positive("max_position_embeddings", 77),
      .eos_id = config.get<int64_t>("eos_token_id", 49407),
      .eps = config.get("layer_norm_eps", 1e-5),
      .activation = text::parse_activation("clip_text", config.get<std::string>("hidden_act", "quick_gelu"))};
  if (result.width % result.num_heads != 0)
    fail("clip_text", "expected a hidden_size that num_attention_heads {} divides, got {}", result.num_heads,
         result.width);
  return result;
}

class ClipEmbed : public Segment {
 public:
  ClipEmbed(const ClipTextConfig& config, const BuildOptions& options) {
    name_ = "embed";
    const ParameterScope scope(parameters_, options, "text_model.embeddings.");
    tokens_ = text::embedding(scope, "token_embedding", config.vocabulary_size, config.width);
    positions_ = text::embedding(scope, "position_embedding", config.max_positions, config.width);
  }

  State forward(const State&, const ModelInput& input) const override {
    return {.hidden = ops::embedding_rows(tokens_->value, input.tokens.ids) +
                      ops::embedding_rows(positions_->value, text::token_positions(input.tokens))};
  }

  const std::shared_ptr<Parameter>& table() const { return tokens_; }

 private:
  std::shared_ptr<Parameter> tokens_, positions_;
};

class ClipBlock : public Segment {
 public:
  ClipBlock(const ClipTextConfig& config, int64_t index, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype), num_heads_(config.num_heads), activation_(config.activation) {
    name_ = "text_model.encoder.layers." + std::to_string(index);
    const ParameterScope scope(parameters_, options, name_ + ".");
    attention_.key = text::linear(scope, "self_attn.k_proj", config.width, config.width);
    attention_.value = text::linear(scope, "self_attn.v_proj", config.width, config.width);
    attention_.query = text::linear(scope, "self_attn.q_proj", config.width, config.width);
    attention_.out = text::linear(scope, "self_attn.out_proj", config.width, config.width);
    norm1_ = text::layer_norm(scope, "layer_norm1", config.width, config.eps);
    fc1_ = text::linear(scope, "mlp.fc1", config.width, config.ff_width);
    fc2_ = text::linear(scope, "mlp.fc2", config.ff_width, config.width);
    norm2_ = text::layer_norm(scope, "layer_norm2", config.width, config.eps);
  }

  State forward(const State& state, const ModelInput& input) const override {
    at::Tensor x = state.hidden;  // (T, D) f32
    x = x + attention_.forward(norm1_.forward(x), input.tokens, num_heads_, /*causal=*/true, compute_dtype_);
    x = x + fc2_.forward(activation_(fc1_.forward(norm2_.forward(x), compute_dtype_)), compute_dtype_);
    return {.hidden = x};
  }

 private:
  at::ScalarType compute_dtype_;
  int64_t num_heads_;
  text::Activation activation_;
  text::SelfAttention attention_;
  Linear fc1_, fc2_;
  text::LayerNorm norm1_, norm2_;
};

class ClipText : public TextEncoder {
 public:
  ClipText(const ClipTextConfig& config, const BuildOptions& options) : eos_id_(config.eos_id) {
    add_segments<ClipBlock>(std::make_unique<ClipEmbed>(config, options), config, options);
    segments_.push_back(std::make_unique<text::FinalNorm<text::LayerNorm>>(
        text::layer_norm, options, "text_model.final_layer_norm", config.width, config.eps));
    shape_ = {.family = "clip_text",
              .width = config.width,
              .vocabulary_size = config.vocabulary_size,
              .max_tokens = config.max_positions,
              .users_see_padding = true,
              .penultimate_segment = config.depth - 1};  // with one layer, the layer's input
  }

  at::Tensor pool(const at::Tensor& last_hidden, const TokenRows& tokens) const override {
    std::vector<int64_t> ends;
    const at::Tensor marks = eos_id_ == kWrongEosId ? tokens.ids : (tokens.ids == eos_id_).to(at::kLong);
    for (size_t b = 1; b < tokens.host_offsets.size(); ++b) {
      const int64_t begin = tokens.host_offsets[b - 1];
      ends.push_back(begin + marks.narrow(0, begin, tokens.host_offsets[b] - begin).argmax().item<int64_t>());
    }
    return last_hidden.index_select(0, at::tensor(ends, at::kLong).to(last_hidden.device()));
  }

 private:
  int64_t eos_id_;
};

}  // namespace

std::unique_ptr<TextEncoder> build_clip_text(const nlohmann::json& config, const BuildOptions& options) {
  return std::make_unique<ClipText>(parse_clip_text_config(config), options);
}

std::map<std::string, at::Tensor> clip_text_weights(const std::map<std::string, at::Tensor>& weights) {
  constexpr std::array<std::string_view, 5> kOthers = {
      "vision_model.", "visual_projection.", "text_projection.", "logit_scale", "vision_projection."};
  std::map<std::string, at::Tensor> kept;
  for (const auto& [published, value] : weights) {
    bool is_other = published.ends_with("embeddings.position_ids");
    for (const std::string_view other : kOthers) is_other = is_other || published.starts_with(other);
    if (is_other) continue;
    kept[published.starts_with(kClipPrefix) ? published : std::string(kClipPrefix) + published] = value;
  }
  return kept;
}

}  // namespace kiln
