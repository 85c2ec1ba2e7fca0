// PixArt's weights in the repository's keys and in those of diffusers' PixArtTransformer2DModel.
#include "core/aten.h"
#include "core/error.h"
#include "models/denoisers/pixart/pixart.h"
#include "models/denoisers/pixart/pixart_keys.h"
#include "models/parts/key_map.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr double kTableTolerance = 1e-5;  // between tables in f64 and f32, values within [-1, 1]
constexpr const char* kPosEmbed = "pos_embed";
constexpr int64_t kAlphaTokens = 120;
constexpr const char* kNullCaption = "y_embedder.y_embedding";
constexpr int64_t kMicroConditionSide = 128;  // sample_size of the models that PixArtAlphaPipeline tells it

at::Tensor position_table_of(const PixartConfig& config) {
  const auto model = build_pixart(config, {.device = at::kMeta});
  for (const auto& parameter : model->parameters())
    if (parameter->key == kPosEmbed) return parameter->init.value;
  throw std::logic_error("PixArt has no pos_embed");
}

// Throws Error when a model of one size has another table in its file than diffusers would compute.
void check_table(const PixartConfig& config, const TensorMap& weights) {
  const auto found = weights.find(kPosEmbed);
  if (config.multi_scale || found == weights.end()) return;
  const at::Tensor table = position_table_of(config);
  const double difference =
      found->second.sizes() == table.sizes()
          ? (found->second.to(at::kDouble) - table.to(at::kDouble)).abs().max().item<double>()
          : 1;
  const double tolerance = found->second.scalar_type() == at::kFloat ? kTableTolerance : 8e-3;
  if (!(difference <= tolerance))
    fail("pixart",
         "pos_embed differs from the sine-cosine table of pe_interpolation {} by {:.3g}: diffusers computes "
         "the "
         "table",
         config.pe_interpolation, difference);
}

// Returns the same config for the repository's keys.
PixartConfig in_repository_keys(PixartConfig config) {
  config.keys = PixartConfig::Keys::kRepository;
  return config;
}

// Maps the repository's keys, which are the fused set, to diffusers'. Neither qk norm nor compression has
// keys in diffusers.
KeyMap pixart_key_map(const PixartConfig& config) {
  const PixartKeys &repository = kPixartRepositoryKeys, &diffusers = kPixartDiffusersKeys;
  KeyMap map;
  for (const auto key :
       {&PixartKeys::patch, &PixartKeys::timestep_1, &PixartKeys::timestep_2, &PixartKeys::modulation,
        &PixartKeys::caption_1, &PixartKeys::caption_2, &PixartKeys::final_linear})
    map.rename_layer(repository.*key, diffusers.*key);
  if (config.micro_condition)
    for (const auto key :
         {&PixartKeys::size_1, &PixartKeys::size_2, &PixartKeys::aspect_1, &PixartKeys::aspect_2})
      map.rename_layer(repository.*key, diffusers.*key);
  map.renamed.emplace_back(repository.final_table, diffusers.final_table);
  for (int64_t i = 0; i < config.depth; ++i) {
    const std::string from = fmt::format("{}.{}.", repository.blocks, i),
                      to = fmt::format("{}.{}.", diffusers.blocks, i);
    map.renamed.emplace_back(from + "scale_shift_table", to + "scale_shift_table");
    for (const auto key : {&PixartKeys::self_out, &PixartKeys::cross_q, &PixartKeys::cross_out,
                           &PixartKeys::mlp_1, &PixartKeys::mlp_2})
      map.rename_layer(from + repository.*key, to + diffusers.*key);
    const auto prefixed = [&](const auto& parts) {
      std::vector<std::string> names;
      for (const char* part : parts) names.push_back(to + part);
      return names;
    };
    map.add_projection(from + kPixartQkv, prefixed(kPixartQkvParts), /*bias=*/true);
    map.add_projection(from + kPixartKv, prefixed(kPixartKvParts), /*bias=*/true);
  }
  map.fused_only = {kPosEmbed, kNullCaption};
  return map;
}

// Throws Error for what diffusers' class cannot express. The null caption has no place there: pipelines
// encode "".
TensorMap pixart_to_diffusers(const PixartConfig& config, const TensorMap& weights,
                              const std::string& source) {
  pixart_diffusers_config(config);  // throws for what the class cannot express
  check_table(config, weights);
  return parted_weights(pixart_key_map(config), weights, source);
}

// The inverse. Adds zeros as the null caption, since pipelines encode "" instead, and the position table
// where the model reads it: models of many sizes compute theirs, and their files lack it
// (pixart_file_keys()).
TensorMap pixart_from_diffusers(const PixartConfig& config, const TensorMap& weights,
                                const std::string& source) {
  TensorMap rest = weights;
  rest.erase("pos_embed.pos_embed");  // old versions of diffusers saved the table
  TensorMap result = fused_weights(pixart_key_map(config), rest, source);
  if (!config.multi_scale) result[kPosEmbed] = position_table_of(in_repository_keys(config));
  result[kNullCaption] =
      at::zeros({config.model_max_length, config.caption_channels}, weights.begin()->second.options());
  return result;
}

}  // namespace

std::optional<RecognisedModel> recognise_pixart(const WeightShapes& shapes, const json& hints) {
  for (const char* key : {"x_embedder.proj.weight", "t_block.1.weight", "blocks.0.scale_shift_table",
                          "blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.fc1.weight"})
    if (!shapes.contains(key)) return std::nullopt;
  if (shapes.contains("attention_y_norm.weight")) return std::nullopt;  // Sana's, a descendant
  RecognisedModel model{.config = to_json(parse_pixart_config(complete_pixart_config(hints, shapes))),
                        .assumed = {}};
  for (const char* key : {"num_heads", "pe_interpolation"})
    if (!hints.contains(key)) model.assumed.push_back(key);
  return model;
}

std::optional<RecognisedModel> recognise_pixart_diffusers(const WeightShapes& shapes, const json& hints) {
  for (const char* key : {"pos_embed.proj.weight", "adaln_single.linear.weight",
                          "transformer_blocks.0.attn2.to_k.weight", "transformer_blocks.0.ff.net.2.weight"})
    if (!shapes.contains(key)) return std::nullopt;
  const json completed = complete_pixart_diffusers_config(hints, shapes);
  RecognisedModel model{.config = pixart_diffusers_config(parse_pixart_diffusers_config(completed)),
                        .assumed = {}};
  for (const char* key : {"num_attention_heads", "sample_size", "interpolation_scale"})
    if (!hints.contains(key)) model.assumed.push_back(key);
  return model;
}

ForeignFormat pixart_diffusers_format() {
  return {
      .class_name = "PixArtTransformer2DModel",
      .component = "transformer",
      .pipeline =
          [](const json& config) {
            const PixartConfig model = parse_pixart_config(config);
            return model.micro_condition || model.model_max_length == kAlphaTokens ? "PixArtAlphaPipeline"
                                                                                   : "PixArtSigmaPipeline";
          },
      .text_encoder = "t5_encoder",
      .absent = {"tokenizer", "text_encoder"},
      .null_rows_key = kNullCaption,
      .config_from =
          [](const json& foreign, const std::string&) {
            return to_json(in_repository_keys(parse_pixart_diffusers_config(foreign)));
          },
      .weights_from =
          [](const json& config, const TensorMap& weights, const std::string& source) {
            return pixart_from_diffusers(parse_pixart_config(config), weights, source);
          },
      .config_to = [](const json& config) { return pixart_diffusers_config(parse_pixart_config(config)); },
      .weights_to =
          [](const json& config, const TensorMap& weights) {
            return pixart_to_diffusers(parse_pixart_config(config), weights, "the model");
          },
      .card = {.forward = "model(x, encoder_hidden_states=rows, encoder_attention_mask=mask, timestep=t, "
                          "added_cond_kwargs=dict(\n"
                          "    resolution=torch.tensor([[height, width]] * len(x), dtype=x.dtype), "
                          "aspect_ratio=torch.tensor([[height / width]] * len(x), dtype=x.dtype))).sample",
               .call = "use_resolution_binning=False",
               .limit = [](const json& foreign) -> std::string {
                 if (!foreign.at("use_additional_conditions").get<bool>() ||
                     foreign.at("sample_size") == kMicroConditionSide)
                   return "";
                 return fmt::format("it tells the picture's size only to models of sample_size {}",
                                    kMicroConditionSide);
               }}};
}

FileKeys pixart_file_keys() {
  return {.are = [](const WeightShapes& shapes) { return shapes.contains(kPosEmbed); },
          .to_model =
              [](const json& config, const TensorMap& weights, const std::string&) {
                TensorMap rest = weights;
                if (parse_pixart_config(config).multi_scale) rest.erase(kPosEmbed);
                return rest;
              },
          .to_file = [](const json&, const TensorMap& tensors) { return tensors; }};
}

}  // namespace kiln
