// DiT's weights between the published keys and those of diffusers' DiTTransformer2DModel.
#include <fmt/ranges.h>

#include <array>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "core/text/json_text.h"
#include "core/text/some_of.h"
#include "models/denoisers/dit/dit.h"

namespace kiln {
namespace {

using nlohmann::json;
using KeyPair = std::pair<std::string, std::string>;  // published, diffusers; both without .weight and .bias

constexpr std::array kSuffixes = {".weight", ".bias"};
constexpr std::array kQkv = {"attn1.to_q", "attn1.to_k", "attn1.to_v"};
constexpr double kPositionTolerance = 1e-5;  // pos_embed in f64 against f32, values within [-1, 1]

std::vector<KeyPair> plain_layers(int64_t depth) {
  std::vector<KeyPair> layers = {{"x_embedder.proj", "pos_embed.proj"},
                                 {"final_layer.adaLN_modulation.1", "proj_out_1"},
                                 {"final_layer.linear", "proj_out_2"}};
  for (int64_t i = 0; i < depth; ++i)
    for (const auto& [published, diffusers] :
         {std::pair("attn.proj", "attn1.to_out.0"), std::pair("mlp.fc1", "ff.net.0.proj"),
          std::pair("mlp.fc2", "ff.net.2"), std::pair("adaLN_modulation.1", "norm1.linear")})
      layers.emplace_back(fmt::format("blocks.{}.{}", i, published),
                          fmt::format("transformer_blocks.{}.{}", i, diffusers));
  return layers;
}

// Pairs of the published key and diffusers' key within a block.
std::vector<KeyPair> embedder_tensors() {
  std::vector<KeyPair> keys = {
      {"y_embedder.embedding_table.weight", "norm1.emb.class_embedder.embedding_table.weight"}};
  for (const auto& [published, diffusers] :
       {std::pair("t_embedder.mlp.0", "linear_1"), std::pair("t_embedder.mlp.2", "linear_2")})
    for (const char* suffix : kSuffixes)
      keys.emplace_back(std::string(published) + suffix,
                        fmt::format("norm1.emb.timestep_embedder.{}{}", diffusers, suffix));
  return keys;
}

// Returns the table that DiT and diffusers compute, taken from the model itself.
at::Tensor position_table(const DitConfig& config) {
  const auto model = build_dit(config, {.device = at::kMeta});
  for (const auto& parameter : model->parameters())
    if (parameter->key == "pos_embed") return parameter->init.value;
  throw std::logic_error("DiT has no pos_embed");
}

void check_expressible(const DitConfig& config, const TensorMap& weights) {
  if (config.num_classes == 0)
    fail("convert", "the model has no label table: diffusers has no class for a DiT without classes");
  if (config.mlp_ratio != 4)
    fail("convert", "mlp_ratio is {}: diffusers' DiT has 4 and no setting for it", config.mlp_ratio);
  if (!config.has_null_class())
    fail("convert",
         "the label table has no null class (class_dropout_prob 0): diffusers' DiT needs that row");
  const auto pos_embed = weights.find("pos_embed");
  if (pos_embed == weights.end()) return;
  const double difference =
      (pos_embed->second.to(at::kDouble) - position_table(config).to(at::kDouble)).abs().max().item<double>();
  const double tolerance = pos_embed->second.scalar_type() == at::kBFloat16 ? 8e-3
                           : pos_embed->second.scalar_type() == at::kHalf   ? 1e-3
                                                                            : kPositionTolerance;
  if (!(difference <= tolerance))
    fail("convert",
         "pos_embed differs from the sine-cosine table by {:.3g}: diffusers computes the table and would "
         "drop what was changed",
         difference);
}

}  // namespace

TensorMap dit_to_diffusers(const DitConfig& config, const TensorMap& weights) {
  check_expressible(config, weights);
  TensorMap result;
  for (const auto& [published, diffusers] : plain_layers(config.depth))
    for (const char* suffix : kSuffixes) result[diffusers + suffix] = weights.at(published + suffix);
  for (int64_t i = 0; i < config.depth; ++i) {
    const std::string block = fmt::format("transformer_blocks.{}.", i);
    for (const auto& [published, diffusers] : embedder_tensors())
      result[block + diffusers] = weights.at(published);
    for (const char* suffix : kSuffixes) {
      const auto parts = weights.at(fmt::format("blocks.{}.attn.qkv{}", i, suffix)).chunk(3, 0);
      for (std::size_t part = 0; part < kQkv.size(); ++part)
        result[block + kQkv[part] + suffix] = parts[part];
    }
  }
  return result;
}

json dit_diffusers_config(const DitConfig& c) {
  return {{"_class_name", "DiTTransformer2DModel"},
          {"activation_fn", "gelu-approximate"},
          {"attention_bias", true},
          {"attention_head_dim", c.hidden_size / c.num_heads},
          {"dropout", 0.0},
          {"in_channels", c.in_channels},
          {"norm_elementwise_affine", false},
          {"norm_eps", 1e-6},
          {"norm_num_groups", 32},
          {"norm_type", "ada_norm_zero"},
          {"num_attention_heads", c.num_heads},
          {"num_embeds_ada_norm", c.num_classes},
          {"num_layers", c.depth},
          {"out_channels", c.out_channels()},
          {"patch_size", c.patch_size},
          {"sample_size", c.input_size},
          {"upcast_attention", false}};
}

DitConfig parse_dit_diffusers_config(const json& config, const std::string& source) {
  if (!config.is_object()) fail("convert", "the config is not a JSON object ({})", source);
  if (config.value("_class_name", json()) != "DiTTransformer2DModel")
    fail("convert", "expected a config of DiTTransformer2DModel, got {} ({})",
         config.value("_class_name", json()).dump(), source);
  const auto require = [&](const char* key, const json& expected, const json& when_absent) {
    const json value = config.value(key, when_absent);
    if (value != expected)
      fail("convert", "{} is {}: DiT has {} ({})", key, brief(value), brief(expected), source);
  };
  require("activation_fn", "gelu-approximate", "gelu-approximate");
  require("norm_type", "ada_norm_zero", "ada_norm_zero");
  require("attention_bias", true, true);
  require("norm_elementwise_affine", false, false);
  try {
    // The defaults here are those of diffusers' class.
    DitConfig result;
    result.num_heads = config.value("num_attention_heads", int64_t{16});
    result.hidden_size = result.num_heads * config.value("attention_head_dim", int64_t{72});
    result.in_channels = config.value("in_channels", int64_t{4});
    result.depth = config.value("num_layers", int64_t{28});
    result.input_size = config.value("sample_size", int64_t{32});
    result.patch_size = config.value("patch_size", int64_t{2});
    result.num_classes = config.value("num_embeds_ada_norm", int64_t{1000});
    const json out_channels = config.value("out_channels", json());
    result.learn_sigma = !out_channels.is_null() && out_channels.get<int64_t>() == 2 * result.in_channels;
    if (!out_channels.is_null() && out_channels.get<int64_t>() != result.out_channels())
      fail("convert", "out_channels is {}: expected {} or {} ({})", out_channels.get<int64_t>(),
           result.in_channels, 2 * result.in_channels, source);
    return parse_dit_config(to_json(result));  // validates
  } catch (const json::exception& error) {
    fail("convert", "the config has a value of a wrong type ({}): {}", source, message_of(error));
  }
}

TensorMap dit_from_diffusers(const DitConfig& config, const TensorMap& weights, const std::string& source) {
  TensorMap rest = weights;
  std::vector<std::string> missing;
  const auto take = [&](const std::string& key) {
    const auto found = rest.find(key);
    if (found == rest.end()) {
      missing.push_back(key);
      return at::Tensor();
    }
    at::Tensor tensor = found->second;
    rest.erase(found);
    return tensor;
  };

  TensorMap result;
  for (const auto& [published, diffusers] : plain_layers(config.depth))
    for (const char* suffix : kSuffixes) result[published + suffix] = take(diffusers + suffix);
  for (int64_t i = 0; i < config.depth; ++i) {
    const std::string block = fmt::format("transformer_blocks.{}.", i);
    for (const auto& [published, diffusers] : embedder_tensors()) {
      const at::Tensor copy = take(block + diffusers);
      at::Tensor& first = result[published];
      if (!first.defined()) first = copy;
      if (copy.defined() && !at::equal(first, copy))
        fail("convert", "{} differs between block 0 and block {}: DiT shares it among all blocks ({})",
             diffusers, i, source);
    }
    for (const char* suffix : kSuffixes) {
      std::vector<at::Tensor> parts;
      parts.reserve(kQkv.size());
      for (const char* part : kQkv) parts.push_back(take(block + part + suffix));
      if (missing.empty()) result[fmt::format("blocks.{}.attn.qkv{}", i, suffix)] = at::cat(parts, 0);
    }
  }
  rest.erase("pos_embed.pos_embed");  // old versions of diffusers saved the table
  std::vector<std::string> problems;
  if (!missing.empty()) problems.push_back("missing keys: " + some_of(missing));
  if (!rest.empty()) {
    std::vector<std::string> unknown;
    for (const auto& [key, tensor] : rest) unknown.push_back(key);
    problems.push_back("unknown keys: " + some_of(unknown));
  }
  if (!problems.empty()) fail("convert", "{} does not fit its config: {}", source, fmt::join(problems, "; "));
  result["pos_embed"] = position_table(config);
  return result;
}

ForeignFormat dit_diffusers_format() {
  return {
      .class_name = "DiTTransformer2DModel",
      .component = "transformer",
      .pipeline = [](const json&) { return "DiTPipeline"; },
      .config_from =
          [](const json& foreign, const std::string& source) {
            return to_json(parse_dit_diffusers_config(foreign, source));
          },
      .weights_from =
          [](const json& config, const TensorMap& weights, const std::string& source) {
            return dit_from_diffusers(parse_dit_config(config), weights, source);
          },
      .config_to = [](const json& config) { return dit_diffusers_config(parse_dit_config(config)); },
      .weights_to =
          [](const json& config, const TensorMap& weights) {
            return dit_to_diffusers(parse_dit_config(config), weights);
          },
      .card = {.forward = "model(x, timestep=t, class_labels=labels).sample",
               .setup = "for block in model.transformer_blocks:  # the frequencies that DiT is trained with\n"
                        "    block.norm1.emb.time_proj.downscale_freq_shift = 0\n",
               .limit = [](const json&) -> std::string {
                 return "it has other frequencies of timesteps, guides all channels, takes class 1000 "
                        "for the null class and drops a learned variance";
               }}};
}

}  // namespace kiln
