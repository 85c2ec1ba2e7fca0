// PixArt's configs as diffusers' PixArtTransformer2DModel writes them.
#include <algorithm>

#include "core/error.h"
#include "core/json_config.h"
#include "models/denoisers/pixart/pixart.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kPixartDiffusers = "pixart_diffusers";
constexpr int64_t kMicroConditionSize = 128;  // models of this sample_size take the picture's size by default
constexpr int64_t kAlphaMaxTokens = 120, kSigmaMaxTokens = 300;
constexpr int64_t kPublishedHeadDim = 72, kHeadDimElsewhere = 64;

// Skips keys that do not change the output in inference and in training without dropout.
void skip_inert(const JsonConfig& reader) {
  reader.get("dropout", 0.0);
  reader.get<int64_t>("norm_num_groups", 32);
  reader.get<int64_t>("num_embeds_ada_norm", 1000);
  reader.get("upcast_attention", false);
  reader.get("use_linear_projection", false);
  reader.get<int64_t>("num_vector_embeds", 0);
}

void refuse_foreign(const JsonConfig& reader) {
  if (reader.has("_class_name") && reader.at("_class_name") != "PixArtTransformer2DModel" &&
      reader.at("_class_name") != "Transformer2DModel")
    fail(kPixartDiffusers, "expected a config of PixArtTransformer2DModel, got {}",
         reader.at("_class_name").dump());
  reader.choice("activation_fn", "gelu-approximate", {"gelu-approximate"});
  reader.choice("norm_type", "ada_norm_single", {"ada_norm_single"});
  reader.choice("attention_type", "default", {"default"});
  if (!reader.get("attention_bias", true)) fail(kPixartDiffusers, "expected attention_bias true, got false");
  if (reader.get("norm_elementwise_affine", false))
    fail(kPixartDiffusers, "expected norm_elementwise_affine false, got true");
}

}  // namespace

const std::map<std::string, json>& pixart_diffusers_presets() {
  static const std::map<std::string, json> presets = {{"pixart_diffusers", json::object()}};
  return presets;
}

PixartConfig parse_pixart_diffusers_config(const json& config) {
  const JsonConfig reader(kPixartDiffusers, config);
  refuse_foreign(reader);
  skip_inert(reader);
  PixartConfig c;
  c.keys = PixartConfig::Keys::kDiffusers;
  c.num_heads = reader.positive("num_attention_heads", 16);
  c.hidden_size = c.num_heads * reader.positive("attention_head_dim", 72);
  c.in_channels = reader.positive("in_channels", 4);
  const int64_t out_channels = config.contains("out_channels") && config.at("out_channels").is_null()
                                   ? c.in_channels
                                   : reader.get<int64_t>("out_channels", 8);
  if (out_channels != c.in_channels && out_channels != 2 * c.in_channels)
    fail(kPixartDiffusers, "expected out_channels {} or {}, got {}", c.in_channels, 2 * c.in_channels,
         out_channels);
  c.pred_sigma = out_channels == 2 * c.in_channels;
  c.depth = reader.positive("num_layers", 28);
  c.input_size = reader.positive("sample_size", 128);
  c.patch_size = reader.positive("patch_size", 2);
  if (c.input_size % c.patch_size != 0)
    fail(kPixartDiffusers, "expected sample_size divisible by patch_size {}, got {}", c.patch_size,
         c.input_size);
  if (c.hidden_size % 4 != 0)
    fail(kPixartDiffusers, "expected a width (heads x head dim) divisible by 4, got {}", c.hidden_size);
  c.norm_eps = reader.get("norm_eps", 1e-6);
  c.pe_interpolation =
      reader.get("interpolation_scale", static_cast<double>(std::max<int64_t>(c.input_size / 64, 1)));
  if (!(c.pe_interpolation > 0))
    fail(kPixartDiffusers, "expected interpolation_scale > 0, got {}", c.pe_interpolation);
  c.micro_condition = reader.get("use_additional_conditions", c.input_size == kMicroConditionSize);
  if (c.micro_condition && c.hidden_size % 3 != 0)
    fail(kPixartDiffusers, "expected a width divisible by 3 with use_additional_conditions, got {}",
         c.hidden_size);
  c.projects_captions = reader.has("caption_channels");
  c.caption_channels = reader.positive("caption_channels", c.hidden_size);
  const int64_t cross = reader.get<int64_t>("cross_attention_dim", 1152);
  if (cross != c.hidden_size)
    fail(kPixartDiffusers, "expected cross_attention_dim {} (heads x head dim), got {}", c.hidden_size,
         cross);
  c.model_max_length = c.micro_condition ? kAlphaMaxTokens : kSigmaMaxTokens;
  reader.refuse_unknown();
  return c;
}

json pixart_diffusers_config(const PixartConfig& c) {
  if (c.qk_norm) fail(kPixartDiffusers, "the model has qk_norm: diffusers has no class for it");
  if (!c.kv_layers.empty())
    fail(kPixartDiffusers, "the model compresses keys and values: diffusers has no class for it");
  if (c.mlp_ratio != 4)
    fail(kPixartDiffusers, "mlp_ratio is {}: diffusers' class has 4 and no setting for it", c.mlp_ratio);
  json config = {{"_class_name", "PixArtTransformer2DModel"},
                 {"activation_fn", "gelu-approximate"},
                 {"attention_bias", true},
                 {"attention_head_dim", c.hidden_size / c.num_heads},
                 {"attention_type", "default"},
                 {"cross_attention_dim", c.hidden_size},
                 {"dropout", 0.0},
                 {"in_channels", c.in_channels},
                 {"interpolation_scale", c.pe_interpolation},
                 {"norm_elementwise_affine", false},
                 {"norm_eps", c.norm_eps},
                 {"norm_num_groups", 32},
                 {"norm_type", "ada_norm_single"},
                 {"num_attention_heads", c.num_heads},
                 {"num_embeds_ada_norm", 1000},
                 {"num_layers", c.depth},
                 {"out_channels", c.out_channels()},
                 {"patch_size", c.patch_size},
                 {"sample_size", c.input_size},
                 {"upcast_attention", false},
                 {"use_additional_conditions", c.micro_condition}};
  config["caption_channels"] = c.projects_captions ? json(c.caption_channels) : json(nullptr);
  return config;
}

json complete_pixart_diffusers_config(const json& config, const WeightShapes& shapes) {
  const auto dimension = [&](const char* key, size_t dim) { return dimension_of(shapes, key, dim); };
  json completed = config;
  const int64_t width = dimension("pos_embed.proj.weight", 0),
                patch = dimension("pos_embed.proj.weight", 2);  // (D, C, p, p)
  if (width == 0 || patch == 0) return completed;
  const auto tell = [&](const char* key, const json& value) {
    if (!config.contains(key)) completed[key] = value;
  };
  const int64_t head_dim = width % kPublishedHeadDim == 0 ? kPublishedHeadDim : kHeadDimElsewhere;
  const int64_t num_heads = JsonConfig(kPixartDiffusers, config)
                                .get<int64_t>("num_attention_heads", std::max<int64_t>(width / head_dim, 1));
  if (num_heads < 1) return completed;  // for the parser to refuse
  tell("num_attention_heads", num_heads);
  tell("attention_head_dim", width / num_heads);
  tell("cross_attention_dim", width);
  tell("in_channels", dimension("pos_embed.proj.weight", 1));
  tell("patch_size", patch);
  tell("out_channels", dimension("proj_out.weight", 0) / (patch * patch));
  int64_t depth = 0;
  while (shapes.contains(fmt::format("transformer_blocks.{}.scale_shift_table", depth))) ++depth;
  tell("num_layers", depth);
  const int64_t captions = dimension("caption_projection.linear_1.weight", 1);
  if (captions > 0) tell("caption_channels", captions);
  tell("use_additional_conditions", shapes.contains("adaln_single.emb.resolution_embedder.linear_1.weight"));
  return completed;
}

json fit_pixart_diffusers_config(const json& config, const ModelNeeds& needs) {
  json fitted = config;
  const PixartConfig model = parse_pixart_diffusers_config(config);
  const int64_t width = needs.hidden_size > 0 ? needs.hidden_size : model.hidden_size;
  const int64_t num_heads = needs.num_heads > 0 ? needs.num_heads : model.num_heads;
  fitted["num_attention_heads"] = num_heads;
  fitted["attention_head_dim"] = width / num_heads;
  fitted["cross_attention_dim"] = width;
  if (needs.depth > 0) fitted["num_layers"] = needs.depth;
  if (needs.patch_size > 0) fitted["patch_size"] = needs.patch_size;
  if (needs.position_scale > 0) fitted["interpolation_scale"] = needs.position_scale;
  if (!config.contains("sample_size")) fitted["sample_size"] = needs.side;
  fitted["in_channels"] = needs.channels;
  fitted["out_channels"] = needs.learns_sigma ? 2 * needs.channels : needs.channels;
  if (needs.text_width > 0) fitted["caption_channels"] = needs.text_width;
  if (!config.contains("use_additional_conditions")) fitted["use_additional_conditions"] = false;
  return fitted;
}

}  // namespace kiln
