// Sana's weights in the keys of its repository and in those of diffusers' SanaTransformer2DModel, which are
// Kiln's.
#include "core/error.h"
#include "models/denoisers/sana/sana.h"
#include "models/parts/key_map.h"

namespace kiln {
namespace {

using nlohmann::json;

bool has_native_keys(const WeightShapes& shapes) {
  return shapes.contains("attention_y_norm.weight") && shapes.contains("x_embedder.proj.weight");
}

void add_block(const SanaConfig& config, int64_t index, KeyMap& map) {
  const std::string from = fmt::format("blocks.{}.", index),
                    to = fmt::format("transformer_blocks.{}.", index);
  map.renamed.emplace_back(from + "scale_shift_table", to + "scale_shift_table");
  map.add_projection(from + "attn.qkv", {to + "attn1.to_q", to + "attn1.to_k", to + "attn1.to_v"},
                     config.attention_bias);
  map.rename_layer(from + "attn.proj", to + "attn1.to_out.0");
  map.rename_layer(from + "cross_attn.q_linear", to + "attn2.to_q");
  map.add_projection(from + "cross_attn.kv_linear", {to + "attn2.to_k", to + "attn2.to_v"}, /*bias=*/true);
  map.rename_layer(from + "cross_attn.proj", to + "attn2.to_out.0");
  map.rename_layer(from + "mlp.inverted_conv.conv", to + "ff.conv_inverted");
  map.rename_layer(from + "mlp.depth_conv.conv", to + "ff.conv_depth");
  map.renamed.emplace_back(from + "mlp.point_conv.conv.weight", to + "ff.conv_point.weight");
  if (!config.qk_norm) return;
  for (const auto& [ours, theirs] : {std::pair("attn", "attn1"), {"cross_attn", "attn2"}})
    for (const auto& [short_name, long_name] : {std::pair("q_norm", "norm_q"), {"k_norm", "norm_k"}})
      map.renamed.emplace_back(fmt::format("{}{}.{}.weight", from, ours, short_name),
                               fmt::format("{}{}.{}.weight", to, theirs, long_name));
}

// Maps the repository's keys, which are the fused set, to diffusers'. Leaves out what the repository saves
// in addition to the model: the null caption, a position table that is not used, the head of the loss's
// variance.
KeyMap sana_key_map(const SanaConfig& config) {
  KeyMap map;
  const std::string embedder =
      config.guidance_embeds ? "time_embed.timestep_embedder" : "time_embed.emb.timestep_embedder";
  map.rename_layer("x_embedder.proj", "patch_embed.proj");
  map.rename_layer("t_embedder.mlp.0", embedder + ".linear_1");
  map.rename_layer("t_embedder.mlp.2", embedder + ".linear_2");
  if (config.guidance_embeds) {
    map.rename_layer("cfg_embedder.mlp.0", "time_embed.guidance_embedder.linear_1");
    map.rename_layer("cfg_embedder.mlp.2", "time_embed.guidance_embedder.linear_2");
  }
  map.rename_layer("t_block.1", "time_embed.linear");
  map.rename_layer("y_embedder.y_proj.fc1", "caption_projection.linear_1");
  map.rename_layer("y_embedder.y_proj.fc2", "caption_projection.linear_2");
  map.renamed.emplace_back("attention_y_norm.weight", "caption_norm.weight");
  for (int64_t i = 0; i < config.num_layers; ++i) add_block(config, i, map);
  map.rename_layer("final_layer.linear", "proj_out");
  map.renamed.emplace_back("final_layer.scale_shift_table", "scale_shift_table");
  map.fused_only = {"y_embedder.y_embedding", "pos_embed", "logvar_linear.weight", "logvar_linear.bias"};
  return map;
}

}  // namespace

std::optional<RecognisedModel> recognise_sana(const WeightShapes& shapes, const json& hints) {
  const bool is_native = has_native_keys(shapes);
  for (const char* key : {"patch_embed.proj.weight", "caption_norm.weight", "time_embed.linear.weight",
                          "transformer_blocks.0.ff.conv_depth.weight"})
    if (!is_native && !shapes.contains(key)) return std::nullopt;
  RecognisedModel model{.config = to_json(parse_sana_config(complete_sana_config(hints, shapes))),
                        .assumed = {}};
  for (const char* key :
       {"attention_head_dim", "num_cross_attention_heads", "sample_size", "interpolation_scale"})
    if (!hints.contains(key)) model.assumed.push_back(key);
  return model;
}

FileKeys sana_file_keys() {
  return {.are = has_native_keys,
          .to_model =
              [](const json& config, const TensorMap& weights, const std::string& source) {
                return parted_weights(sana_key_map(parse_sana_config(config)), weights, source);
              },
          .to_file =
              [](const json& config, const TensorMap& tensors) {
                return fused_weights(sana_key_map(parse_sana_config(config)), tensors, "the model");
              }};
}

ForeignFormat sana_diffusers_format() {
  return {.class_name = "SanaTransformer2DModel",
          .component = "transformer",
          .pipeline =
              [](const json& config) {
                return parse_sana_config(config).guidance_embeds ? "SanaSprintPipeline" : "SanaPipeline";
              },
          .text_encoder = "gemma2",
          .absent = {"tokenizer", "text_encoder"},
          .config_from = [](const json& foreign,
                            const std::string&) { return to_json(parse_sana_config(foreign)); },
          .weights_from = [](const json&, const TensorMap& weights, const std::string&) { return weights; },
          .config_to =
              [](const json& config) {
                json foreign = to_json(parse_sana_config(config));
                foreign["_class_name"] = "SanaTransformer2DModel";
                return foreign;
              },
          .weights_to = [](const json&, const TensorMap& weights) { return weights; },
          .card = {.forward = "model(x, encoder_hidden_states=rows, encoder_attention_mask=mask, "
                              "timestep=t * model.config.timestep_scale).sample",
                   .call = "use_resolution_binning=False",
                   .takes_flow_match = true,
                   .limit = nullptr}};
}

}  // namespace kiln
