// The U-Net's keys in the original Stable Diffusion files (model.diffusion_model.input_blocks..), as they lie
// in single-file checkpoints.
#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/error.h"
#include "models/denoisers/unet.h"

namespace kiln {
namespace {

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

}  // namespace

std::string original_unet_key(const UnetConfig& config, const std::string& key) {
  const std::string part = original_part(config, key);
  if (part.empty()) fail("unet", "{} is no key of this U-Net", key);
  return std::string(kOriginalPrefix) + part;
}

std::map<std::string, at::Tensor> current_unet_weights(const UnetConfig& config,
                                                       const std::map<std::string, at::Tensor>& weights) {
  const auto is_original = [](const auto& entry) { return entry.first.starts_with(kOriginalPrefix); };
  if (std::ranges::none_of(weights, is_original)) return weights;
  const auto model = build_unet(config, {.device = at::kMeta, .outline = true});
  std::map<std::string, std::string> names;  // diffusers' key by the original one
  for (const auto& parameter : model->parameters())
    names[original_unet_key(config, parameter->key)] = parameter->key;
  std::map<std::string, at::Tensor> current;
  for (const auto& [key, weight] : weights) {
    if (!key.starts_with(kOriginalPrefix)) continue;
    const auto found = names.find(key);
    current[found == names.end() ? key : found->second] = weight;
  }
  return current;
}

}  // namespace kiln
