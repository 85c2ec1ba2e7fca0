#include "models/text/encoders.h"

#include <cmath>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "models/text/text_layers.h"
#include "ops/ops.h"

namespace kiln {
namespace {

struct Gemma2Config {
  int64_t vocabulary_size, width, ff_width, depth, num_heads, num_kv_heads, head_dim, window;
  double eps, rope_theta, query_scale, soft_cap;
  bool attention_bias;
  std::vector<bool> is_windowed;  // for each layer
  text::Activation activation;
};

// Reads the base of the rotation angles. transformers 5 nests it; older files have it at the top.
double parse_rope_theta(const JsonConfig& config) {
  if (!config.has("rope_parameters")) return config.get("rope_theta", 10000.0);
  const nlohmann::json nested = config.object("rope_parameters");
  const JsonConfig rope("gemma2", nested);
  rope.choice("rope_type", "default", {"default"});
  return rope.get("rope_theta", 10000.0);
}

// Returns for each layer whether it sees only a window. By default every second layer does, beginning with
// the first.
std::vector<bool> parse_windows(const JsonConfig& config, int64_t depth) {
  std::vector<bool> is_windowed;
  if (!config.has("layer_types")) {
    for (int64_t i = 0; i < depth; ++i) is_windowed.push_back(i % 2 == 0);
    return is_windowed;
  }
  for (const std::string& type : config.require<std::vector<std::string>>("layer_types")) {
    if (type != "sliding_attention" && type != "full_attention")
      fail("gemma2", "expected layer_types of sliding_attention and full_attention, got {:?}", type);
    is_windowed.push_back(type == "sliding_attention");
  }
  if (static_cast<int64_t>(is_windowed.size()) < depth)
    fail("gemma2", "expected {} layer_types, got {}", depth, is_windowed.size());
  return is_windowed;
}

Gemma2Config parse_gemma2_config(const nlohmann::json& json) {
  const JsonConfig config("gemma2", json);
  config.refuse("use_bidirectional_attention", false);
  const int64_t depth = config.positive("num_hidden_layers", 26);
  Gemma2Config result{.vocabulary_size = config.positive("vocab_size", 256000),
                      .width = config.positive("hidden_size", 2304),
                      .ff_width = config.positive("intermediate_size", 9216),
                      .depth = depth,
                      .num_heads = config.positive("num_attention_heads", 8),
                      .num_kv_heads = config.positive("num_key_value_heads", 4),
                      .head_dim = config.positive("head_dim", 256),
                      .window = config.positive("sliding_window", 4096),
                      .eps = config.get("rms_norm_eps", 1e-6),
                      .rope_theta = parse_rope_theta(config),
                      .query_scale = 1 / std::sqrt(config.get("query_pre_attn_scalar", 256.0)),
                      .soft_cap = config.get("attn_logit_softcapping", 50.0),
                      .attention_bias = config.get("attention_bias", false),
                      .is_windowed = parse_windows(config, depth),
                      .activation = text::parse_activation(
                          "gemma2", config.get<std::string>("hidden_activation", "gelu_pytorch_tanh"))};
  if (result.num_heads % result.num_kv_heads != 0 || result.head_dim % 2 != 0)
    fail("gemma2",
         "expected num_key_value_heads to divide num_attention_heads and an even head_dim, got {}, {}, {}",
         result.num_kv_heads, result.num_heads, result.head_dim);
  return result;
}

// Rotates pairs (i, i + d / 2) of the heads x (T, H, d) by position / theta^(2 i / d). (Su et al. 2021)
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cosines - halves[1] * sines, halves[1] * cosines + halves[0] * sines}, -1);
}

class Gemma2Block : public Segment {
 public:
  Gemma2Block(const Gemma2Config& config, int64_t index, const BuildOptions& options)
      : config_(config),
        compute_dtype_(options.compute_dtype),
        window_(config.is_windowed[index] ? config.window : 0) {
    name_ = "layers." + std::to_string(index);
    const ParameterScope scope(parameters_, options, name_ + ".");
    const int64_t width = config.width, kv_width = config.num_kv_heads * config.head_dim;
    const auto projection = config.attention_bias ? text::linear : text::linear_without_bias;
    q_ = projection(scope, "self_attn.q_proj", width, config.num_heads * config.head_dim);
    k_ = projection(scope, "self_attn.k_proj", width, kv_width);
    v_ = projection(scope, "self_attn.v_proj", width, kv_width);
    out_ = projection(scope, "self_attn.o_proj", config.num_heads * config.head_dim, width);
    gate_ = text::linear_without_bias(scope, "mlp.gate_proj", width, config.ff_width);
    up_ = text::linear_without_bias(scope, "mlp.up_proj", width, config.ff_width);
    down_ = text::linear_without_bias(scope, "mlp.down_proj", config.ff_width, width);
    const auto norm = [&](const char* name) {
      return text::rms_norm(scope, name, width, config.eps, /*offset=*/1);
    };
    for (int64_t i = 0; i < config.head_dim; i += 2)
      frequencies_.push_back(1 / std::pow(static_cast<float>(config.rope_theta),
                                          static_cast<float>(i) / static_cast<float>(config.head_dim)));
    input_norm_ = norm("input_layernorm");
    post_attention_norm_ = norm("post_attention_layernorm");
    pre_ff_norm_ = norm("pre_feedforward_layernorm");
    post_ff_norm_ = norm("post_feedforward_layernorm");
  }

  State forward(const State& state, const ModelInput& input) const override {
    return run(state, input.tokens, nullptr, nullptr);
  }

  // `after`: the prefix that the texts continue, or null. `fills`: receives the keys and values of the
  // tokens, or is null.
  State run(const State& state, const TokenRows& tokens, const TokenPrefix::Keys* after,
            TokenPrefix::Keys* fills) const {
    at::Tensor x = state.hidden;  // (T, D) f32
    x = x + post_attention_norm_.forward(attention(input_norm_.forward(x), tokens, after, fills));
    x = x + post_ff_norm_.forward(mlp(pre_ff_norm_.forward(x)));
    return {.hidden = x};
  }

 private:
  at::Tensor attention(const at::Tensor& x, const TokenRows& tokens, const TokenPrefix::Keys* after,
                       TokenPrefix::Keys* fills) const {
    const at::Tensor in = text::as_input(x, compute_dtype_);
    const auto heads = [&](const Linear& projection) {  // (T, heads, d)
      const at::Tensor rows = projection.forward(in, compute_dtype_);
      return rows.view({rows.size(0), rows.size(1) / config_.head_dim, config_.head_dim});
    };
    const int64_t past = after ? after->keys.size(0) : 0;
    const at::Tensor positions = (text::token_positions(tokens) + past).to(at::kFloat);
    const at::Tensor angles =
        positions.unsqueeze(1) * ops::on_device(at::tensor(frequencies_, at::kFloat), x.device());
    const at::Tensor cosines = angles.cos().unsqueeze(1), sines = angles.sin().unsqueeze(1);  // (T, 1, d / 2)
    const at::Tensor q = rotated(heads(q_), cosines, sines).to(compute_dtype_);
    const at::Tensor k = rotated(heads(k_), cosines, sines).to(compute_dtype_);
    const at::Tensor v = heads(v_);
    text::AttentionOptions options{
        .scale = config_.query_scale, .causal = true, .window = window_, .soft_cap = config_.soft_cap};
    if (after) {
      options.past_keys = after->keys;
      options.past_values = after->values;
    }
    if (fills) *fills = {.keys = k, .values = v};
    return out_.forward(text::attention(q, k, v, tokens, options), compute_dtype_);
  }

  at::Tensor mlp(const at::Tensor& x) const {
    const at::Tensor in = text::as_input(x, compute_dtype_);
    const at::Tensor inner = config_.activation(gate_.forward(in, compute_dtype_));
    return down_.forward(inner * up_.forward(in, compute_dtype_), compute_dtype_);
  }

  Gemma2Config config_;
  at::ScalarType compute_dtype_;
  int64_t window_;
  std::vector<float> frequencies_;  // of the rotation of each pair
  Linear q_, k_, v_, out_, gate_, up_, down_;
  text::RmsNorm input_norm_, post_attention_norm_, pre_ff_norm_, post_ff_norm_;
};

class Gemma2 : public TextEncoder {
 public:
  Gemma2(const Gemma2Config& config, const BuildOptions& options) {
    add_segments<Gemma2Block>(
        std::make_unique<text::TableEmbed>("embed_tokens", config.vocabulary_size, config.width, options,
                                           std::sqrt(static_cast<float>(config.width))),
        config, options);
    segments_.push_back(std::make_unique<text::FinalNorm<text::RmsNorm>>(
        text::rms_norm, options, "norm", config.width, config.eps, /*offset=*/1));
    shape_ = {.family = "gemma2",
              .width = config.width,
              .vocabulary_size = config.vocabulary_size,
              .storage_dtype = at::kBFloat16};  // its features overflow in fp16
    const auto element = static_cast<int64_t>(at::elementSize(options.compute_dtype));
    constexpr int64_t kKeysAndValues = 2;
    prefix_bytes_ = config.depth * kKeysAndValues * config.num_kv_heads * config.head_dim * element +
                    config.width * static_cast<int64_t>(sizeof(float));
  }

  State forward_segment(size_t i, const State& state, const TextBatch& batch) const override {
    const auto* block = dynamic_cast<const Gemma2Block*>(segments_[i].get());
    if (!block) return TextEncoder::forward_segment(i, state, batch);
    if (batch.fills) batch.fills->segments.resize(segments_.size());
    return block->run(state, batch.tokens, batch.after ? &batch.after->segments[i] : nullptr,
                      batch.fills ? &batch.fills->segments[i] : nullptr);
  }
  int64_t prefix_bytes(int64_t num_tokens) const override { return num_tokens * prefix_bytes_; }

 private:
  int64_t prefix_bytes_ = 0;  // of one token
};

}  // namespace

std::unique_ptr<TextEncoder> build_gemma2(const nlohmann::json& config, const BuildOptions& options) {
  return std::make_unique<Gemma2>(parse_gemma2_config(config), options);
}

std::map<std::string, at::Tensor> gemma2_weights(const std::map<std::string, at::Tensor>& weights) {
  std::map<std::string, at::Tensor> kept;
  for (const auto& [published, value] : weights)
    if (published != "lm_head.weight")
      kept[published.starts_with("model.") ? published.substr(6) : published] = value;
  return kept;
}

}  // namespace kiln
