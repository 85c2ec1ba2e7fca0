#include <array>

#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"
#include "models/denoisers/sana/sana.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kQkNorm = "rms_norm_across_heads";

struct PublishedSana {
  const char* name;
  bool large;  // width 2240 (1.6B and up), else 1152
  int64_t depth, sample_size;
  double interpolation_scale;  // 0: no positions
  bool qk_norm, guidance;
};
constexpr std::array kPublishedSana = {
    PublishedSana{"Sana-600M", false, 28, 32, 0, false, false},
    PublishedSana{"Sana-600M-512", false, 28, 16, 0, false, false},
    PublishedSana{"Sana-1600M", true, 20, 32, 0, false, false},
    PublishedSana{"Sana-1600M-512", true, 20, 16, 0, false, false},
    PublishedSana{"Sana-1600M-2K", true, 20, 64, 1, false, false},
    PublishedSana{"Sana-1600M-4K", true, 20, 128, 2, false, false},
    PublishedSana{"Sana-1.5-1600M", true, 20, 32, 0, true, false},
    PublishedSana{"Sana-1.5-4800M", true, 60, 32, 0, true, false},
    PublishedSana{"Sana-Sprint-600M", false, 28, 32, 0, true, true},
    PublishedSana{"Sana-Sprint-1600M", true, 20, 32, 0, true, true},
};

// The keys of weights whose shapes determine the config.
struct SanaShapeKeys {
  const char *patch, *final_linear, *caption, *guidance, *blocks, *cross_q, *point, *self_bias, *q_norm;
};
constexpr SanaShapeKeys kDiffusersShapeKeys = {.patch = "patch_embed.proj.weight",
                                               .final_linear = "proj_out.weight",
                                               .caption = "caption_projection.linear_1.weight",
                                               .guidance = "time_embed.guidance_embedder.linear_1.weight",
                                               .blocks = "transformer_blocks",
                                               .cross_q = "attn2.to_q.weight",
                                               .point = "ff.conv_point.weight",
                                               .self_bias = "attn1.to_q.bias",
                                               .q_norm = "attn1.norm_q.weight"};
constexpr SanaShapeKeys kNativeShapeKeys = {.patch = "x_embedder.proj.weight",
                                            .final_linear = "final_layer.linear.weight",
                                            .caption = "y_embedder.y_proj.fc1.weight",
                                            .guidance = "cfg_embedder.mlp.0.weight",
                                            .blocks = "blocks",
                                            .cross_q = "cross_attn.q_linear.weight",
                                            .point = "mlp.point_conv.conv.weight",
                                            .self_bias = "attn.qkv.bias",
                                            .q_norm = "attn.q_norm.weight"};

void sana_requires(bool valid, const char* key, const std::string& expected, const std::string& got) {
  if (!valid) fail("sana", "expected {} {}, got {}", key, expected, got);
}

void validate(const SanaConfig& c) {
  sana_requires(c.sample_size % c.patch_size == 0, "sample_size (a latent's side)",
                fmt::format("divisible by patch_size {}", c.patch_size), std::to_string(c.sample_size));
  sana_requires(!c.interpolation_scale || *c.interpolation_scale > 0, "interpolation_scale", "> 0 or null",
                fmt::format("{}", c.interpolation_scale.value_or(0)));
  sana_requires(!c.interpolation_scale || c.width() % 4 == 0, "the width (heads x head dim)",
                "divisible by 4 (position table)", std::to_string(c.width()));
  sana_requires(c.mlp_ratio > 0 && c.mlp_size() > 0, "mlp_ratio", "> 0", fmt::format("{}", c.mlp_ratio));
}

}  // namespace

const std::map<std::string, json>& sana_presets() {
  static const std::map<std::string, json> presets = [] {
    std::map<std::string, json> table = {{"sana", json::object()}};
    for (const PublishedSana& model : kPublishedSana) {
      json& preset = table[model.name];
      preset = {{"num_attention_heads", model.large ? 70 : 36},
                {"num_cross_attention_heads", model.large ? 20 : 16},
                {"cross_attention_head_dim", model.large ? 112 : 72},
                {"cross_attention_dim", model.large ? 2240 : 1152},
                {"num_layers", model.depth},
                {"sample_size", model.sample_size}};
      if (model.interpolation_scale > 0) preset["interpolation_scale"] = model.interpolation_scale;
      if (model.qk_norm) preset["qk_norm"] = kQkNorm;
      if (model.guidance) {
        preset["guidance_embeds"] = true;
        preset["timestep_scale"] = 1000.0;
      }
    }
    return table;
  }();
  return presets;
}

SanaConfig parse_sana_config(const json& config) {
  const JsonConfig reader("sana", config);
  if (reader.has("_class_name") && reader.at("_class_name") != "SanaTransformer2DModel")
    fail("sana", "expected a config of SanaTransformer2DModel, got {}", brief(reader.at("_class_name")));
  reader.get("dropout", 0.0);
  if (reader.get("norm_elementwise_affine", false))
    fail("sana", "expected norm_elementwise_affine false, got true");
  SanaConfig c;
  c.sample_size = reader.positive("sample_size", c.sample_size);
  c.patch_size = reader.positive("patch_size", c.patch_size);
  c.in_channels = reader.positive("in_channels", c.in_channels);
  const bool null_out = config.contains("out_channels") && config.at("out_channels").is_null();
  c.out_channels = reader.positive("out_channels", null_out ? c.in_channels : c.out_channels);
  c.num_attention_heads = reader.positive("num_attention_heads", c.num_attention_heads);
  c.attention_head_dim = reader.positive("attention_head_dim", c.attention_head_dim);
  c.num_layers = reader.positive("num_layers", c.num_layers);
  c.num_cross_attention_heads = reader.positive("num_cross_attention_heads", c.num_cross_attention_heads);
  c.cross_attention_head_dim = reader.positive("cross_attention_head_dim", c.cross_attention_head_dim);
  c.caption_channels = reader.positive("caption_channels", c.caption_channels);
  KILN_GET_FIELDS(reader, c, mlp_ratio, attention_bias);
  c.qk_norm = reader.choice("qk_norm", "", {"", kQkNorm}) == kQkNorm;
  c.norm_eps = reader.get("norm_eps", c.norm_eps);
  if (reader.has("interpolation_scale"))
    c.interpolation_scale = reader.require<double>("interpolation_scale");
  KILN_GET_FIELDS(reader, c, guidance_embeds, guidance_embeds_scale, timestep_scale);
  const int64_t cross_input = reader.get<int64_t>("cross_attention_dim", c.width());
  reader.refuse_unknown();
  validate(c);
  sana_requires(cross_input == c.width(), "cross_attention_dim",
                fmt::format("{} (num_attention_heads x attention_head_dim)", c.width()),
                std::to_string(cross_input));
  return c;
}

json to_json(const SanaConfig& c) {
  json config = {{"cross_attention_dim", c.width()}, {"norm_elementwise_affine", false}, {"dropout", 0.0}};
  KILN_WRITE_FIELDS(config, c, sample_size, patch_size, in_channels, out_channels, num_attention_heads,
                    attention_head_dim, num_layers, num_cross_attention_heads, cross_attention_head_dim,
                    caption_channels, mlp_ratio, attention_bias, norm_eps, guidance_embeds,
                    guidance_embeds_scale, timestep_scale);
  config["qk_norm"] = c.qk_norm ? json(kQkNorm) : json(nullptr);
  config["interpolation_scale"] = c.interpolation_scale ? json(*c.interpolation_scale) : json(nullptr);
  return config;
}

json complete_sana_config(const json& config, const WeightShapes& shapes) {
  const SanaShapeKeys& keys =
      shapes.contains("x_embedder.proj.weight") ? kNativeShapeKeys : kDiffusersShapeKeys;
  const auto dimension = [&](const std::string& key, size_t dim) { return dimension_of(shapes, key, dim); };
  json completed = config;
  const int64_t width = dimension(keys.patch, 0), patch = dimension(keys.patch, 2);  // (D, C, p, p)
  if (width == 0 || patch == 0) return completed;
  const auto tell = [&](const char* key, const json& value) {
    if (!config.contains(key)) completed[key] = value;
  };
  const auto in_block = [&](int64_t block, const char* key) {
    return fmt::format("{}.{}.{}", keys.blocks, block, key);
  };
  const JsonConfig told("sana", config);
  const int64_t told_heads = told.get<int64_t>("num_attention_heads", 0);
  const int64_t head_dim = told.get<int64_t>(
      "attention_head_dim", told_heads > 0 ? width / told_heads : SanaConfig().attention_head_dim);
  if (head_dim < 1) return completed;  // for parse_sana_config() to refuse
  if (width % head_dim != 0)
    fail("sana",
         "the weights do not tell how many heads a width of {} has: give --model-config "
         "'{{\"num_attention_heads\": N}}'",
         width);
  tell("attention_head_dim", head_dim);
  tell("num_attention_heads", width / head_dim);
  tell("cross_attention_dim", width);
  tell("in_channels", dimension(keys.patch, 1));
  tell("patch_size", patch);
  tell("out_channels", dimension(keys.final_linear, 0) / (patch * patch));
  tell("caption_channels", dimension(keys.caption, 1));
  int64_t depth = 0;
  while (shapes.contains(in_block(depth, "scale_shift_table"))) ++depth;
  tell("num_layers", depth);
  const int64_t cross = dimension(in_block(0, keys.cross_q), 0);
  for (const auto& [heads, size] : {std::pair<int64_t, int64_t>{20, 112}, {16, 72}})
    if (cross == heads * size && !config.contains("cross_attention_head_dim")) {
      tell("num_cross_attention_heads", heads);
      tell("cross_attention_head_dim", size);
    }
  if (cross == width && !completed.contains("cross_attention_head_dim")) {
    tell("num_cross_attention_heads", width / head_dim);
    const int64_t heads = completed.at("num_cross_attention_heads");
    if (heads > 0) tell("cross_attention_head_dim", width / heads);
  }
  tell("mlp_ratio", static_cast<double>(dimension(in_block(0, keys.point), 1)) / static_cast<double>(width));
  tell("attention_bias", shapes.contains(in_block(0, keys.self_bias)));
  if (shapes.contains(in_block(0, keys.q_norm))) tell("qk_norm", kQkNorm);
  tell("guidance_embeds", shapes.contains(keys.guidance));
  return completed;
}

json fit_sana_config(const json& config, const ModelNeeds& needs) {
  if (needs.learns_sigma)
    fail("sana", "Sana has no learned sigma: train it with flow, epsilon or v_prediction");
  json fitted = config;
  const SanaConfig model = parse_sana_config(config);
  const int64_t width = needs.hidden_size > 0 ? needs.hidden_size : model.width();
  fitted["cross_attention_dim"] = width;
  if (needs.hidden_size > 0 || needs.num_heads > 0) {
    const int64_t num_heads = needs.num_heads > 0 ? needs.num_heads : width / model.attention_head_dim;
    if (num_heads < 1 || width % num_heads != 0)
      fail("sana", "expected a width divisible by {} heads, got {}", num_heads, width);
    fitted["num_attention_heads"] = num_heads;
    fitted["attention_head_dim"] = width / num_heads;
    fitted["num_cross_attention_heads"] = num_heads;
    fitted["cross_attention_head_dim"] = width / num_heads;
  }
  if (needs.depth > 0) fitted["num_layers"] = needs.depth;
  if (needs.patch_size > 0) fitted["patch_size"] = needs.patch_size;
  if (needs.position_scale > 0) fitted["interpolation_scale"] = needs.position_scale;
  if (!config.contains("sample_size")) fitted["sample_size"] = needs.side;
  fitted["in_channels"] = needs.channels;
  fitted["out_channels"] = needs.channels;
  if (needs.text_width > 0) fitted["caption_channels"] = needs.text_width;
  return fitted;
}

}  // namespace kiln
