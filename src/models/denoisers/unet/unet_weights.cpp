// The U-Net's weights in the keys of diffusers' UNet2DConditionModel, which are Kiln's, and in those of the
// original Stable Diffusion files (model.diffusion_model.input_blocks..), as they lie in single-file
// checkpoints.
#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>

#include "core/error.h"
#include "models/denoisers/unet/unet.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kUnetClass = "UNet2DConditionModel";
constexpr int64_t kHeadWidth = 64;  // of heads of SD 2.x; SD 1.x has 8 heads at every width
constexpr int64_t kSd1TextWidth = 768;
constexpr int64_t kPublishedNormGroups = 32;
constexpr std::string_view kOriginalPrefix = "model.diffusion_model.";

struct PartName {
  std::string_view name, original;
};
constexpr PartName kTopParts[] = {{"time_embedding.linear_1", "time_embed.0"},
                                  {"time_embedding.linear_2", "time_embed.2"},
                                  {"conv_in", "input_blocks.0.0"},
                                  {"conv_norm_out", "out.0"},
                                  {"conv_out", "out.2"},
                                  {"mid_block.resnets.0", "middle_block.0"},
                                  {"mid_block.attentions.0", "middle_block.1"},
                                  {"mid_block.resnets.1", "middle_block.2"}};
constexpr PartName kResnetParts[] = {{"norm1", "in_layers.0"},          {"conv1", "in_layers.2"},
                                     {"time_emb_proj", "emb_layers.1"}, {"norm2", "out_layers.0"},
                                     {"conv2", "out_layers.3"},         {"conv_shortcut", "skip_connection"}};

// Removes `prefix` and the dot after it from `text`. Returns false if `text` does not begin with them.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix) || text.size() <= prefix.size() || text[prefix.size()] != '.') return false;
  text.remove_prefix(prefix.size() + 1);
  return true;
}

int64_t take_number(std::string_view& text) {
  int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto length = static_cast<size_t>(end - text.data());
  if (error != std::errc() || length >= text.size() || text[length] != '.') return -1;
  text.remove_prefix(length + 1);
  return number;
}

// "conv1.weight" -> "in_layers.2.weight"
std::string resnet_part(std::string_view rest) {
  for (const PartName& part : kResnetParts)
    if (take(rest, part.name)) return fmt::format("{}.{}", part.original, rest);
  return std::string(rest);
}

// The original numbers blocks through all levels. On the way down a level has a block for each resnet and one
// for the downsampler, on the way up a block for each resnet.
std::string level_part(const UnetConfig& config, std::string_view rest, bool is_up) {
  const int64_t block = take_number(rest);
  if (block < 0 || block >= config.num_levels()) return "";
  const auto level_of = [&](int64_t b) { return is_up ? config.num_levels() - 1 - b : b; };
  int64_t first = is_up ? 0 : 1;
  for (int64_t b = 0; b < block; ++b) first += config.layers_per_block[level_of(b)] + 1;
  const int64_t layers = config.layers_per_block[level_of(block)];
  const char* blocks = is_up ? "output_blocks" : "input_blocks";
  if (take(rest, "resnets")) {
    const int64_t index = take_number(rest);
    return fmt::format("{}.{}.0.{}", blocks, first + index, resnet_part(rest));
  }
  if (take(rest, "attentions")) {
    const int64_t index = take_number(rest);
    return fmt::format("{}.{}.1.{}", blocks, first + index, rest);
  }
  if (take(rest, "downsamplers.0.conv")) return fmt::format("{}.{}.0.op.{}", blocks, first + layers, rest);
  if (take(rest, "upsamplers.0.conv"))
    return fmt::format("{}.{}.{}.conv.{}", blocks, first + layers, config.up_attention[block] ? 2 : 1, rest);
  return "";
}

std::string original_part(const UnetConfig& config, const std::string& key) {
  std::string_view rest = key;
  if (take(rest, "down_blocks")) return level_part(config, rest, /*is_up=*/false);
  if (take(rest, "up_blocks")) return level_part(config, rest, /*is_up=*/true);
  for (const PartName& part : kTopParts) {
    std::string_view tail = key;
    if (!take(tail, part.name)) continue;
    return fmt::format("{}.{}", part.original,
                       part.name.starts_with("mid_block.resnets") ? resnet_part(tail) : std::string(tail));
  }
  return "";
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
    const auto* conv = find_shape(shapes, block + "resnets.0.conv1.weight", 4);
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
  const std::string prefix(kOriginalPrefix);
  const auto* first = find_shape(shapes, prefix + "input_blocks.0.0.weight", 4);
  const auto* text = find_shape(shapes, prefix + "middle_block.1.transformer_blocks.0.attn2.to_k.weight", 2);
  if (first == nullptr || text == nullptr) return std::nullopt;
  json config = unet_presets().at((*text)[1] == kSd1TextWidth ? "sd15" : "sd21-v");
  config["in_channels"] = (*first)[1];
  return RecognisedModel{.config = to_json(parse_unet_config(config)), .assumed = {}};
}

}  // namespace

std::string original_unet_key(const UnetConfig& config, const std::string& key) {
  const std::string part = original_part(config, key);
  if (part.empty()) fail("unet", "{} is no key of this U-Net", key);
  return std::string(kOriginalPrefix) + part;
}

TensorMap current_unet_weights(const UnetConfig& config, const TensorMap& weights) {
  const auto is_original = [](const auto& entry) { return entry.first.starts_with(kOriginalPrefix); };
  if (std::ranges::none_of(weights, is_original)) return weights;
  const auto model = build_unet(config, {.device = at::kMeta, .outline = true});
  std::map<std::string, std::string> names;  // diffusers' key by the original one
  for (const auto& parameter : model->parameters())
    names[original_unet_key(config, parameter->key)] = parameter->key;
  TensorMap current;
  for (const auto& [key, weight] : weights) {
    if (!key.starts_with(kOriginalPrefix)) continue;
    const auto found = names.find(key);
    current[found == names.end() ? key : found->second] = weight;
  }
  return current;
}

std::optional<RecognisedModel> recognise_unet(const WeightShapes& shapes, const json& hints) {
  const int64_t num_levels = count_numbered(shapes, "down_blocks.", ".resnets.0.conv1.weight");
  if (num_levels == 0 || !shapes.contains("conv_in.weight") ||
      !shapes.contains("mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"))
    return recognise_original_unet(shapes);
  json config = unet_levels(shapes, num_levels);
  config = complete_unet_config(config, shapes);
  RecognisedModel model;
  const auto widths = config["block_out_channels"].get<std::vector<int64_t>>();
  if (config.value("cross_attention_dim", kSd1TextWidth) != kSd1TextWidth) {
    std::vector<int64_t> heads;
    for (const int64_t width : widths) heads.push_back(std::max<int64_t>(1, width / kHeadWidth));
    config["attention_head_dim"] = heads;
  }
  int64_t groups = kPublishedNormGroups;
  for (const int64_t width : widths) groups = std::gcd(groups, width);
  config["norm_num_groups"] = groups;
  for (const char* key : {"attention_head_dim", "norm_num_groups"})
    if (!hints.contains(key)) model.assumed.push_back(key);
  for (const char* key : {"attention_head_dim", "norm_num_groups", "sample_size"})
    if (hints.contains(key)) config[key] = hints[key];
  model.config = to_json(parse_unet_config(config));
  return model;
}

FileKeys unet_file_keys() {
  return {
      .are =
          [](const WeightShapes& shapes) {
            return shapes.contains(std::string(kOriginalPrefix) + "input_blocks.0.0.weight");
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

}  // namespace kiln
