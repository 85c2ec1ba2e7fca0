#include "models/features/dinov2.h"

#include <ATen/core/grad_mode.h>

#include <fmt/ranges.h>

#include <cmath>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "models/features/picture_input.h"
#include "models/parts/layers.h"

namespace kiln {

namespace {

constexpr int64_t kEvaluatedSide = 224;
// ImageNet's, with which all published models were trained.
constexpr double kMean[] = {0.485, 0.456, 0.406}, kDeviation[] = {0.229, 0.224, 0.225};

Linear linear_of(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out,
                 bool has_bias) {
  if (has_bias) return scope.linear(name, in, out, Init::zeros());
  return {.weight = scope.add(name + ".weight", {out, in}, Init::zeros()), .bias = nullptr};
}

struct Attention {
  Linear query, key, value, out;
  int64_t num_heads = 1;

  Attention(const ParameterScope& scope, const Dinov2Config& config)
      : query(linear_of(scope, "attention.query", config.hidden_size, config.hidden_size, config.qkv_bias)),
        key(linear_of(scope, "attention.key", config.hidden_size, config.hidden_size, config.qkv_bias)),
        value(linear_of(scope, "attention.value", config.hidden_size, config.hidden_size, config.qkv_bias)),
        out(linear_of(scope, "output.dense", config.hidden_size, config.hidden_size, true)),
        num_heads(config.num_heads) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const auto heads = [&](const Linear& layer) {  // (B, H, N, d)
      return layer.forward(x, dtype).view({x.size(0), x.size(1), num_heads, -1}).transpose(1, 2);
    };
    const at::Tensor attended = at::scaled_dot_product_attention(heads(query), heads(key), heads(value));
    return out.forward(attended.transpose(1, 2).flatten(2), dtype);
  }
};

struct Mlp {
  bool swiglu;
  Linear in, out;

  static int64_t hidden(const Dinov2Config& config) {
    const auto wide = static_cast<int64_t>(static_cast<double>(config.hidden_size) * config.mlp_ratio);
    return config.swiglu ? (static_cast<int64_t>(static_cast<double>(wide) * 2 / 3) + 7) / 8 * 8 : wide;
  }
  Mlp(const ParameterScope& scope, const Dinov2Config& config)
      : swiglu(config.swiglu),
        in(linear_of(scope, swiglu ? "weights_in" : "fc1", config.hidden_size,
                     (swiglu ? 2 : 1) * hidden(config), true)),
        out(linear_of(scope, swiglu ? "weights_out" : "fc2", hidden(config), config.hidden_size, true)) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const at::Tensor wide = in.forward(x, dtype);
    if (!swiglu) return out.forward(at::gelu(wide), dtype);
    const int64_t half = wide.size(-1) / 2;
    return out.forward(at::silu(wide.narrow(-1, 0, half)) * wide.narrow(-1, half, half), dtype);
  }
};

struct Layer {
  LayerNorm norm1;
  Attention attention;
  std::shared_ptr<Parameter> scale1;
  LayerNorm norm2;
  Mlp mlp;
  std::shared_ptr<Parameter> scale2;

  Layer(const ParameterScope& scope, const Dinov2Config& config)
      : norm1(scope.layer_norm("norm1", config.hidden_size, config.norm_eps)),
        attention(scope.under("attention"), config),
        scale1(scope.add("layer_scale1.lambda1", {config.hidden_size}, Init::ones())),
        norm2(scope.layer_norm("norm2", config.hidden_size, config.norm_eps)),
        mlp(scope.under("mlp"), config),
        scale2(scope.add("layer_scale2.lambda1", {config.hidden_size}, Init::ones())) {}

  at::Tensor forward(at::Tensor x, at::ScalarType dtype) const {
    x = x + attention.forward(norm1.forward(x, at::kFloat), dtype) * scale1->value;
    return x + mlp.forward(norm2.forward(x, at::kFloat), dtype) * scale2->value;
  }
};

using Weights = std::map<std::string, at::Tensor>;

struct Renaming {
  const char *part, *name;
};
// The names of transformers 5 for modules within a layer.
constexpr Renaming kTransformers5[] = {{".attention.q_proj.", ".attention.attention.query."},
                                       {".attention.k_proj.", ".attention.attention.key."},
                                       {".attention.v_proj.", ".attention.attention.value."},
                                       {".attention.o_proj.", ".attention.output.dense."},
                                       {".mlp.down_proj.", ".mlp.weights_out."}};
// The names of the original repository.
constexpr Renaming kOriginal[] = {{"patch_embed.proj.", "embeddings.patch_embeddings.projection."},
                                  {"pos_embed", "embeddings.position_embeddings"},
                                  {"cls_token", "embeddings.cls_token"},
                                  {"register_tokens", "embeddings.register_tokens"},
                                  {"mask_token", "embeddings.mask_token"},
                                  {"blocks.", "encoder.layer."},
                                  {".attn.proj.", ".attention.output.dense."},
                                  {".ls1.gamma", ".layer_scale1.lambda1"},
                                  {".ls2.gamma", ".layer_scale2.lambda1"},
                                  {".mlp.w12.", ".mlp.weights_in."},
                                  {".mlp.w3.", ".mlp.weights_out."}};

template <size_t N>
std::string renamed(std::string key, const Renaming (&renamings)[N]) {
  for (const Renaming& renaming : renamings)
    if (const size_t at = key.find(renaming.part); at != key.npos)
      key.replace(at, std::string_view(renaming.part).size(), renaming.name);
  return key;
}

Weights from_original(const Weights& weights) {
  Weights result;
  for (const auto& [key, value] : weights) {
    std::string name = key.starts_with("norm.") ? "layernorm." + key.substr(5) : renamed(key, kOriginal);
    const size_t at = name.find(".attn.qkv.");
    if (at == name.npos) {
      result[name] = value;
      continue;
    }
    const auto thirds = value.chunk(3, 0);
    constexpr const char* kParts[] = {"query", "key", "value"};
    for (size_t i = 0; i < thirds.size() && i < 3; ++i)
      result[name.substr(0, at) + ".attention.attention." + kParts[i] + name.substr(at + 9)] = thirds[i];
  }
  return result;
}

// Renames keys of transformers 4 and 5. Joins the gate of an MLP and the projection that it gates, the gate's
// rows first.
Weights from_transformers(const Weights& weights) {
  Weights result;
  for (const auto& [key, value] : weights) {
    const std::string name = renamed(key.starts_with("dinov2.") ? key.substr(7) : key, kTransformers5);
    const size_t gate = name.find(".mlp.gate_proj."), up = name.find(".mlp.up_proj.");
    if (up != name.npos) continue;
    if (gate == name.npos) {
      result[name] = value;
      continue;
    }
    std::string partner = key;
    partner.replace(partner.find("gate_proj"), 9, "up_proj");
    const auto found = weights.find(partner);
    if (found == weights.end()) fail("dinov2", "the weights have {} but not {}", key, partner);
    result[name.substr(0, gate) + ".mlp.weights_in." + name.substr(gate + 15)] =
        at::cat({value, found->second});
  }
  return result;
}

}  // namespace

struct Dinov2::Layers {
  std::shared_ptr<Parameter> class_token, position_table, registers;  // registers may be null
  Conv2d patches;
  std::vector<Layer> blocks;
  std::optional<LayerNorm> norm;
};

Dinov2Config parse_dinov2_config(const nlohmann::json& json) {
  const JsonConfig config("dinov2", json);
  const std::string type = config.choice("model_type", "dinov2", {"dinov2", "dinov2_with_registers"});
  config.refuse("num_channels", 3);
  config.choice("hidden_act", "gelu", {"gelu"});
  Dinov2Config parsed;
  parsed.hidden_size = config.positive("hidden_size", parsed.hidden_size);
  parsed.depth = config.positive("num_hidden_layers", parsed.depth);
  parsed.num_heads = config.positive("num_attention_heads", parsed.num_heads);
  parsed.mlp_ratio = config.get<double>("mlp_ratio", parsed.mlp_ratio);
  parsed.has_registers = type == "dinov2_with_registers";
  parsed.image_size = config.positive("image_size", 224);
  parsed.patch_size = config.positive("patch_size", parsed.has_registers ? 16 : 14);
  parsed.qkv_bias = config.get<bool>("qkv_bias", true);
  parsed.swiglu = config.get<bool>("use_swiglu_ffn", false);
  parsed.norm_eps = config.get<double>("layer_norm_eps", parsed.norm_eps);
  if (parsed.has_registers) parsed.num_registers = config.get<int64_t>("num_register_tokens", 4);
  if (parsed.hidden_size % parsed.num_heads != 0)
    fail("dinov2", "expected hidden_size {} to be a multiple of num_attention_heads {}", parsed.hidden_size,
         parsed.num_heads);
  if (parsed.mlp_ratio <= 0) fail("dinov2", "expected mlp_ratio above 0, got {}", parsed.mlp_ratio);
  if (parsed.image_size < parsed.patch_size)
    fail("dinov2", "expected image_size of at least one patch of {}, got {}", parsed.patch_size,
         parsed.image_size);
  return parsed;
}

Dinov2::Dinov2(const Dinov2Config& config, const BuildOptions& options)
    : config_(config), compute_dtype_(options.compute_dtype) {
  const ParameterScope root(parameters_, options), embeddings = root.under("embeddings");
  auto layers = std::make_unique<Layers>();
  const int64_t grid = config.image_size / config.patch_size;
  layers->class_token = embeddings.add("cls_token", {1, 1, config.hidden_size}, Init::zeros());
  if (config.num_registers > 0)
    layers->registers =
        embeddings.add("register_tokens", {1, config.num_registers, config.hidden_size}, Init::zeros());
  layers->position_table =
      embeddings.add("position_embeddings", {1, 1 + grid * grid, config.hidden_size}, Init::zeros());
  layers->patches = embeddings.conv2d("patch_embeddings.projection", 3, config.hidden_size, config.patch_size,
                                      config.patch_size);
  for (int64_t i = 0; i < config.depth; ++i)
    layers->blocks.emplace_back(root.under("encoder.layer." + std::to_string(i)), config);
  layers->norm = root.layer_norm("layernorm", config.hidden_size, config.norm_eps);
  layers_ = std::move(layers);
}

Dinov2::~Dinov2() = default;

at::Tensor Dinov2::positions(int64_t grid_h, int64_t grid_w, bool is_square) const {
  const at::Tensor& table = layers_->position_table->value;
  const int64_t stored = table.size(1) - 1;
  if (grid_h * grid_w == stored && is_square) return table;
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(stored)));
  const at::Tensor grid =
      table.narrow(1, 1, stored).view({1, side, side, -1}).permute({0, 3, 1, 2}).contiguous();
  const at::Tensor resized = config_.has_registers
                                 ? at::_upsample_bicubic2d_aa(grid, {grid_h, grid_w}, /*align_corners=*/false)
                                 : at::upsample_bicubic2d(grid, {grid_h, grid_w}, /*align_corners=*/false);
  return at::cat({table.narrow(1, 0, 1), resized.permute({0, 2, 3, 1}).reshape({1, grid_h * grid_w, -1})}, 1);
}

Dinov2Features Dinov2::forward(const at::Tensor& images) const {
  const int64_t patch = config_.patch_size;
  if (images.dim() != 4 || images.size(1) != 3 || images.size(2) < patch || images.size(3) < patch)
    fail("dinov2", "expected images (B, 3, H, W) with sides of at least {}, got ({})", patch,
         fmt::join(images.sizes(), ", "));
  const int64_t batch = images.size(0);
  const at::Tensor patches =
      layers_->patches.forward(images, compute_dtype_).to(at::kFloat).flatten(2).transpose(1, 2);
  at::Tensor tokens = at::cat({layers_->class_token->value.expand({batch, 1, -1}), patches}, 1);
  tokens =
      tokens + positions(images.size(2) / patch, images.size(3) / patch, images.size(2) == images.size(3));
  if (layers_->registers)
    tokens = at::cat({tokens.narrow(1, 0, 1), layers_->registers->value.expand({batch, -1, -1}),
                      tokens.narrow(1, 1, tokens.size(1) - 1)},
                     1);
  for (const Layer& layer : layers_->blocks) tokens = layer.forward(tokens, compute_dtype_);
  const at::Tensor normed = layers_->norm->forward(tokens, at::kFloat);
  return {.last_hidden_state = normed, .pooler_output = normed.select(1, 0)};
}

at::Tensor dinov2_input(const at::Tensor& pictures, const std::string& resize) {
  check_pictures("dinov2", pictures);
  const at::Tensor values = pictures.to(at::kFloat);
  at::Tensor sized;
  if (resize == "pillow")
    sized = resize_like_pillow(values, kEvaluatedSide);
  else if (resize == "tf1")
    sized = resize_like_tensorflow1(values, kEvaluatedSide);
  else
    fail("dinov2", "expected resize pillow or tf1, got \"{}\"", resize);
  const auto per_channel = [&](const double(&numbers)[3]) {
    return at::tensor(at::ArrayRef<double>(numbers, 3), values.options()).view({1, 3, 1, 1});
  };
  return (sized / 255 - per_channel(kMean)) / per_channel(kDeviation);
}

Weights dinov2_weights(const Weights& weights) {
  Weights result = weights.contains("pos_embed") ? from_original(weights) : from_transformers(weights);
  result.erase("embeddings.mask_token");  // used in pre-training only
  return result;
}

Dinov2Config dinov2_config_of(const Weights& weights, const std::string& source) {
  const auto shape = [&](const std::string& key) {
    const auto found = weights.find(key);
    if (found == weights.end())
      fail("dinov2", "{} does not hold DINOv2's weights: {} is missing", source, key);
    return found->second.sizes();
  };
  const at::IntArrayRef projection = shape("embeddings.patch_embeddings.projection.weight"),
                        positions = shape("embeddings.position_embeddings");
  if (projection.size() != 4 || positions.size() != 3 || projection[0] % 64 != 0)
    fail("dinov2", "{} does not hold DINOv2's weights: unknown shapes", source);
  Dinov2Config config;
  config.hidden_size = projection[0];
  config.num_heads = projection[0] / 64;
  config.patch_size = projection[2];
  config.image_size = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(positions[1] - 1)))) *
                      config.patch_size;
  config.depth = 0;
  while (weights.contains(fmt::format("encoder.layer.{}.norm1.weight", config.depth))) ++config.depth;
  config.swiglu = weights.contains("encoder.layer.0.mlp.weights_in.weight");
  config.qkv_bias = weights.contains("encoder.layer.0.attention.attention.query.bias");
  if (const auto found = weights.find("embeddings.register_tokens"); found != weights.end()) {
    config.has_registers = true;
    config.num_registers = found->second.size(1);
  }
  return config;
}

}  // namespace kiln
