#include "models/text/encoders.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "models/text/text_layers.h"
#include "ops/ops.h"

namespace kiln {
namespace {

struct T5Config {
  int64_t vocabulary_size, width, head_dim, ff_width, depth, num_heads, num_buckets, max_distance;
  double eps;
  bool gated;  // gate(x) * linear(x), as in v1.1
  text::Activation activation;
  int64_t inner_width() const { return num_heads * head_dim; }
};

T5Config parse_t5_config(const nlohmann::json& json) {
  const JsonConfig config("t5", json);
  const auto projection = config.get<std::string>("feed_forward_proj", "relu");
  const bool gated = projection.starts_with("gated-");
  std::string activation = gated ? projection.substr(6) : projection;
  if (projection == "gated-gelu") activation = "gelu_new";  // T5 v1.1 means this one
  const int64_t num_heads = config.positive("num_heads", 8),
                num_buckets = config.positive("relative_attention_num_buckets", 32);
  if (num_buckets < 4 || num_buckets % 2 != 0)
    fail("t5", "expected an even relative_attention_num_buckets of at least 4, got {}", num_buckets);
  const int64_t max_distance = config.positive("relative_attention_max_distance", 128);
  if (max_distance <= num_buckets / 4)
    fail("t5", "expected relative_attention_max_distance above {}, got {}", num_buckets / 4, max_distance);
  return {.vocabulary_size = config.positive("vocab_size", 32128),
          .width = config.positive("d_model", 512),
          .head_dim = config.positive("d_kv", 64),
          .ff_width = config.positive("d_ff", 2048),
          .depth = config.positive("num_layers", 6),
          .num_heads = num_heads,
          .num_buckets = num_buckets,
          .max_distance = max_distance,
          .eps = config.get("layer_norm_epsilon", 1e-6),
          .gated = gated,
          .activation = text::parse_activation("t5", activation)};
}

// Returns the bucket of key - query. Half of the buckets are for keys after the query. Buckets are exact for
// short distances and logarithmic up to max_distance. (Raffel et al. 2020, sec. 2.1)
int64_t bucket_of(int64_t offset, const T5Config& config) {
  const int64_t half = config.num_buckets / 2, num_exact = half / 2;
  const int64_t side = offset > 0 ? half : 0, distance = std::abs(offset);
  if (distance < num_exact) return side + distance;
  const float ratio =
      std::log(static_cast<float>(distance) / static_cast<float>(num_exact)) /
      static_cast<float>(std::log(static_cast<double>(config.max_distance) / static_cast<double>(num_exact)));
  const auto logarithmic = num_exact + static_cast<int64_t>(ratio * static_cast<float>(half - num_exact));
  return side + std::min(logarithmic, half - 1);
}

// Returns the buckets (L, L) of every query and key.
at::Tensor relative_buckets(int64_t length, const T5Config& config, at::Device device) {
  std::vector<int64_t> buckets(static_cast<size_t>(length * length));
  for (int64_t query = 0; query < length; ++query)
    for (int64_t key = 0; key < length; ++key) buckets[query * length + key] = bucket_of(key - query, config);
  return ops::on_device(at::tensor(buckets, at::kLong).view({length, length}), device);
}

int64_t longest_text(const TokenRows& tokens) {
  int64_t longest = 0;
  for (size_t b = 1; b < tokens.host_offsets.size(); ++b)
    longest = std::max(longest, tokens.host_offsets[b] - tokens.host_offsets[b - 1]);
  return longest;
}

class T5Block : public Segment {
 public:
  T5Block(const T5Config& config, int64_t index, const BuildOptions& options)
      : config_(config), compute_dtype_(options.compute_dtype) {
    name_ = "encoder.block." + std::to_string(index);
    const ParameterScope block(parameters_, options, name_ + ".");
    const ParameterScope attention = block.under("layer.0.SelfAttention");
    q_ = text::linear_without_bias(attention, "q", config.width, config.inner_width());
    k_ = text::linear_without_bias(attention, "k", config.width, config.inner_width());
    v_ = text::linear_without_bias(attention, "v", config.width, config.inner_width());
    out_ = text::linear_without_bias(attention, "o", config.inner_width(), config.width);
    if (index == 0)
      bias_table_ =
          text::embedding(attention, "relative_attention_bias", config.num_buckets, config.num_heads);
    attention_norm_ = text::rms_norm(block, "layer.0.layer_norm", config.width, config.eps);
    const ParameterScope ff = block.under("layer.1.DenseReluDense");
    wi_ = text::linear_without_bias(ff, config.gated ? "wi_0" : "wi", config.width, config.ff_width);
    if (config.gated) gate_ = text::linear_without_bias(ff, "wi_1", config.width, config.ff_width);
    wo_ = text::linear_without_bias(ff, "wo", config.ff_width, config.width);
    ff_norm_ = text::rms_norm(block, "layer.1.layer_norm", config.width, config.eps);
  }

  State forward(const State& state, const ModelInput& input) const override {
    const at::Tensor bias = bias_table_ ? position_bias(input.tokens) : state.bias;  // (H, L, L)
    at::Tensor x = state.hidden;                                                     // (T, D) f32
    x = x + attention(attention_norm_.forward(x), bias, input.tokens);
    x = x + feed_forward(ff_norm_.forward(x));
    return {.hidden = x, .bias = bias};
  }

 private:
  at::Tensor position_bias(const TokenRows& tokens) const {
    const at::Tensor buckets = relative_buckets(longest_text(tokens), config_, tokens.ids.device());
    return ops::embedding_rows(bias_table_->value, buckets).permute({2, 0, 1}).contiguous();
  }

  at::Tensor attention(const at::Tensor& x, const at::Tensor& bias, const TokenRows& tokens) const {
    const at::Tensor in = text::as_input(x, compute_dtype_);
    const auto heads = [&](const Linear& projection) {
      return projection.forward(in, compute_dtype_).view({x.size(0), config_.num_heads, config_.head_dim});
    };
    return out_.forward(text::attention(heads(q_), heads(k_), heads(v_), tokens, {.bias = bias}),
                        compute_dtype_);
  }

  at::Tensor feed_forward(const at::Tensor& x) const {
    const at::Tensor in = text::as_input(x, compute_dtype_);
    at::Tensor inner = config_.activation(wi_.forward(in, compute_dtype_));
    if (gate_.weight) inner = inner * gate_.forward(in, compute_dtype_);
    // Runs the last product in f32 because it overflows in fp16.
    return wo_.forward(inner, compute_dtype_ == at::kHalf ? at::kFloat : compute_dtype_);
  }

  T5Config config_;
  at::ScalarType compute_dtype_;
  Linear q_, k_, v_, out_, wi_, gate_, wo_;
  std::shared_ptr<Parameter> bias_table_;  // (buckets, H); the first block has it for all blocks
  text::RmsNorm attention_norm_, ff_norm_;
};

class T5Encoder : public TextEncoder {
 public:
  T5Encoder(const T5Config& config, const BuildOptions& options) {
    add_segments<T5Block>(
        std::make_unique<text::TableEmbed>("shared", config.vocabulary_size, config.width, options), config,
        options);
    segments_.push_back(std::make_unique<text::FinalNorm<text::RmsNorm>>(
        text::rms_norm, options, "encoder.final_layer_norm", config.width, config.eps, 0));
    shape_ = {.family = "t5_encoder", .width = config.width, .vocabulary_size = config.vocabulary_size};
  }
};

}  // namespace

std::unique_ptr<TextEncoder> build_t5_encoder(const nlohmann::json& config, const BuildOptions& options) {
  return std::make_unique<T5Encoder>(parse_t5_config(config), options);
}

std::map<std::string, at::Tensor> t5_encoder_weights(const std::map<std::string, at::Tensor>& weights) {
  std::map<std::string, at::Tensor> kept;
  for (const auto& [key, value] : weights) {
    if (key == "encoder.embed_tokens.weight")
      kept.emplace("shared.weight", value);
    else if (!key.starts_with("decoder.") && !key.starts_with("lm_head."))
      kept.insert_or_assign(key, value);
  }
  return kept;
}

}  // namespace kiln
