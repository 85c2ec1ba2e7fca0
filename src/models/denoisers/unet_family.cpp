#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/json_config.h"
#include "models/denoisers/families.h"
#include "models/denoisers/unet.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kUnetClass = "UNet2DConditionModel";
constexpr const char* kSingleFilePrefix = "model.diffusion_model.";  // of keys of single-file checkpoints
constexpr int64_t kHeadWidth = 64;  // of heads of SD 2.x; SD 1.x has 8 heads at every width
constexpr int64_t kSd1TextWidth = 768;
constexpr int64_t kPublishedNormGroups = 32;
// Options of a run that trains as the models' repository does.
constexpr const char* kEpsilon = R"({"objective": "epsilon", "beta-schedule": "scaled_linear",
                                     "beta-start": 0.00085, "beta-end": 0.012})";
constexpr const char* kVPrediction = R"({"objective": "v_prediction", "beta-schedule": "scaled_linear",
                                         "beta-start": 0.00085, "beta-end": 0.012})";

json fit_unet_config(const json& config, const ModelNeeds& needs) {
  if (needs.learns_sigma)
    fail("unet", "the U-Net predicts no sigma: choose --objective epsilon or v_prediction");
  for (const int64_t given : {needs.hidden_size, needs.depth, needs.num_heads, needs.patch_size})
    if (given > 0)
      fail("unet",
           "--hidden-size, --depth, --num-heads and --patch-size are for transformers: give "
           "--model-config '{{\"block_out_channels\": [..]}}'");
  if (needs.position_scale > 0) fail("unet", "--position-scale: a U-Net has no positions to scale");
  json fitted = config;
  fitted["sample_size"] = needs.side;
  fitted["in_channels"] = fitted["out_channels"] = needs.channels;
  if (needs.text_width > 0) fitted["cross_attention_dim"] = needs.text_width;
  return fitted;
}

const std::vector<int64_t>* shape_of_dims(const WeightShapes& shapes, const std::string& key,
                                          size_t num_dims) {
  const auto found = shapes.find(key);
  return found != shapes.end() && found->second.size() == num_dims ? &found->second : nullptr;
}

int64_t count_numbered(const WeightShapes& shapes, const std::string& before, const std::string& after) {
  int64_t number = 0;
  while (shapes.contains(fmt::format("{}{}{}", before, number, after))) ++number;
  return number;
}

// Returns the config of every level that shapes under diffusers' keys tell.
json unet_levels(const WeightShapes& shapes, int64_t num_levels) {
  std::vector<int64_t> widths, layers, depths;
  std::vector<std::string> down, up;
  for (int64_t level = 0; level < num_levels; ++level) {
    const std::string block = fmt::format("down_blocks.{}.", level);
    const auto* conv = shape_of_dims(shapes, block + "resnets.0.conv1.weight", 4);
    if (conv == nullptr) fail("unet", "{}resnets.0.conv1.weight is not a convolution's weight", block);
    widths.push_back((*conv)[0]);
    layers.push_back(count_numbered(shapes, block + "resnets.", ".conv1.weight"));
    const std::string attention = block + "attentions.0.transformer_blocks.";
    depths.push_back(std::max<int64_t>(1, count_numbered(shapes, attention, ".attn2.to_k.weight")));
    down.push_back(shapes.contains(attention + "0.attn2.to_k.weight") ? "CrossAttnDownBlock2D"
                                                                      : "DownBlock2D");
    up.push_back(shapes.contains(fmt::format("up_blocks.{}.attentions.0.proj_in.weight", level))
                     ? "CrossAttnUpBlock2D"
                     : "UpBlock2D");
  }
  return {{"block_out_channels", widths},
          {"layers_per_block", layers},
          {"transformer_layers_per_block", depths},
          {"down_block_types", down},
          {"up_block_types", up}};
}

// Recognises a single-file checkpoint. The width of the captions tells which published model it is.
std::optional<RecognisedModel> recognise_original_unet(const WeightShapes& shapes) {
  const std::string prefix = kSingleFilePrefix;
  const auto* first = shape_of_dims(shapes, prefix + "input_blocks.0.0.weight", 4);
  const auto* text =
      shape_of_dims(shapes, prefix + "middle_block.1.transformer_blocks.0.attn2.to_k.weight", 2);
  if (first == nullptr || text == nullptr) return std::nullopt;
  json config = unet_presets().at((*text)[1] == kSd1TextWidth ? "sd15" : "sd21-v");
  config["in_channels"] = (*first)[1];
  return RecognisedModel{.config = to_json(parse_unet_config(config)), .assumed = {}};
}

std::optional<RecognisedModel> recognise_unet(const WeightShapes& shapes, const json& hints) {
  const int64_t num_levels = count_numbered(shapes, "down_blocks.", ".resnets.0.conv1.weight");
  if (num_levels == 0 || !shapes.contains("conv_in.weight") ||
      !shapes.contains("mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"))
    return recognise_original_unet(shapes);
  json config = unet_levels(shapes, num_levels);
  config = complete_unet_config(config, shapes);
  RecognisedModel model;
  if (hints.is_object() && hints.contains("attention_head_dim")) {
    config["attention_head_dim"] = hints["attention_head_dim"];
  } else if (config.value("cross_attention_dim", kSd1TextWidth) != kSd1TextWidth) {
    std::vector<int64_t> heads;
    for (const int64_t width : config["block_out_channels"].get<std::vector<int64_t>>())
      heads.push_back(std::max<int64_t>(1, width / kHeadWidth));
    config["attention_head_dim"] = heads;
  }
  if (!hints.is_object() || !hints.contains("attention_head_dim"))
    model.assumed.push_back("attention_head_dim");
  if (hints.is_object() && hints.contains("norm_num_groups")) {
    config["norm_num_groups"] = hints["norm_num_groups"];
  } else {
    int64_t groups = kPublishedNormGroups;
    for (const int64_t width : config["block_out_channels"].get<std::vector<int64_t>>())
      groups = std::gcd(groups, width);
    config["norm_num_groups"] = groups;
    model.assumed.push_back("norm_num_groups");
  }
  if (hints.is_object() && hints.contains("sample_size")) config["sample_size"] = hints["sample_size"];
  model.config = to_json(parse_unet_config(config));
  return model;
}

// Converts between Kiln's keys and those of single-file checkpoints.
FileKeys unet_original_keys() {
  return {
      .are =
          [](const WeightShapes& shapes) {
            return shapes.contains(std::string(kSingleFilePrefix) + "input_blocks.0.0.weight");
          },
      .to_model = [](const json& config, const TensorMap& weights,
                     const std::string&) { return current_unet_weights(parse_unet_config(config), weights); },
      .to_file =
          [](const json& config, const TensorMap& tensors) {
            const UnetConfig parsed = parse_unet_config(config);
            TensorMap original;
            for (const auto& [key, tensor] : tensors) original[original_unet_key(parsed, key)] = tensor;
            return original;
          }};
}

ForeignFormat unet_diffusers_format() {
  return {.class_name = kUnetClass,
          .component = "unet",
          .pipeline = [](const json&) { return "StableDiffusionPipeline"; },
          .text_encoder = "clip_text",
          .objective = R"({"type": "ddpm", "prediction_type": "epsilon", "beta_schedule": "scaled_linear",
                           "beta_start": 0.00085, "beta_end": 0.012})",
          .absent = {"text_encoder", "tokenizer", "safety_checker", "feature_extractor"},
          .config_from = [](const json& foreign,
                            const std::string&) { return to_json(parse_unet_config(foreign)); },
          .weights_from =
              [](const json& config, const TensorMap& weights, const std::string&) {
                return current_unet_weights(parse_unet_config(config), weights);
              },
          .config_to =
              [](const json& config) {
                json written = config;
                written["_class_name"] = kUnetClass;
                return written;
              },
          .weights_to = [](const json&, const TensorMap& weights) { return weights; },
          .card = {.forward = "model(x, t, encoder_hidden_states=rows, encoder_attention_mask=mask).sample",
                   .passes_masks = false}};
}

// Configs of the models that measure a machine.
constexpr const char
    *kNarrow = R"({"block_out_channels": [64, 128], "layers_per_block": 1, "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})",
    *kThreeStages = R"({"block_out_channels": [96, 192, 192], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]})",
    *kWide = R"({"block_out_channels": [128, 256], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})",
    *kPublishedWidths = R"({"block_out_channels": [320, 640], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})";

}  // namespace

Family unet_family() {
  return {.name = "unet2d_condition",
          .presets = unet_presets,
          .resolve = [](const json& config) { return to_json(parse_unet_config(config)); },
          .complete = complete_unet_config,
          .fit = fit_unet_config,
          .build = [](const json& config,
                      const BuildOptions& options) { return build_unet(parse_unet_config(config), options); },
          .recognise = recognise_unet,
          .formats = {unet_diffusers_format()},
          .file_keys = {unet_original_keys()},
          .size_key = "sample_size",
          // From the model cards of stable-diffusion-v1-1, v1-5, 2 and 2-1.
          .published = {{"sd15", 256, 2048, 1e-4, 237'000, "Stable Diffusion 1.1's 237K steps at 256 px"},
                        {"sd15", 512, 2048, 1e-4, 1'304'000,
                         "Stable Diffusion 1.5's 194K, 515K and 595K steps at 512 px, after 237K at 256"},
                        {"sd21-v", 768, 2048, 1e-4, 350'000,
                         "Stable Diffusion 2.1's 140K, 55K and 155K steps at 768 px, after 1.55M at less"},
                        {"sd", 0, 2048, 1e-4, 0, "Stable Diffusion's model cards"}},
          // Levels with and without attention, narrow and of the published widths, on large and small feature
          // maps.
          .calibration = {{0, 0, 0, 0, 256, 4, 0, kNarrow},
                          {0, 0, 0, 0, 128, 12, 0, kThreeStages},
                          {0, 0, 0, 0, 256, 2, 0, kWide},
                          {0, 0, 0, 0, 128, 2, 0, kPublishedWidths},
                          {0, 0, 0, 0, 256, 12, 6, kNarrow}},
          .objectives = {{"sd21-v", kVPrediction}, {"", kEpsilon}},
          // The pipeline in diffusers with the scheduler of each model's folder.
          .sampling = {{"sd21-v", "ddim", 50, 7.5}, {"", "pndm", 50, 7.5}}};
}

}  // namespace kiln
