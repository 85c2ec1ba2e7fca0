#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"
#include "models/denoisers/unet/unet_config.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kUnet = "unet";
constexpr int64_t kInpaintingChannels = 9;

// Reads one entry per level. A list is taken as it is, a single number is repeated.
std::vector<int64_t> per_level(const JsonConfig& reader, const char* key, size_t num_levels,
                               int64_t otherwise) {
  if (!reader.has(key)) return std::vector<int64_t>(num_levels, otherwise);
  if (!reader.at(key).is_array()) return std::vector<int64_t>(num_levels, reader.positive(key, otherwise));
  auto values = reader.get(key, std::vector<int64_t>());
  if (values.size() != num_levels)
    fail(kUnet, "expected {} to have {} entries, one per block_out_channels, got {}", key, num_levels,
         values.size());
  for (const int64_t value : values)
    if (value < 1) fail(kUnet, "expected {} to be at least 1, got {}", key, value);
  return values;
}

// Returns for each block whether its type has attention.
std::vector<bool> attention_of(const JsonConfig& reader, const char* key, const std::string& with,
                               const std::string& without, const std::vector<bool>& otherwise,
                               size_t num_levels) {
  std::vector<bool> attention = otherwise;
  if (reader.has(key)) {
    attention.clear();
    for (const std::string& type : reader.get(key, std::vector<std::string>())) {
      if (type != with && type != without)
        fail(kUnet, "config key {} holds {}; only {} and {} are built", key, type, with, without);
      attention.push_back(type == with);
    }
  }
  if (attention.size() != num_levels)
    fail(kUnet, "expected {} {}, one per block_out_channels, got {}", num_levels, key, attention.size());
  return attention;
}

void refuse_variants(const JsonConfig& reader) {
  const std::pair<const char*, json> inactive[] = {{"center_input_sample", false},
                                                   {"mid_block_type", "UNetMidBlock2DCrossAttn"},
                                                   {"only_cross_attention", false},
                                                   {"downsample_padding", 1},
                                                   {"mid_block_scale_factor", 1},
                                                   {"dropout", 0.0},
                                                   {"act_fn", "silu"},
                                                   {"dual_cross_attention", false},
                                                   {"resnet_time_scale_shift", "default"},
                                                   {"resnet_skip_time_act", false},
                                                   {"resnet_out_scale_factor", 1.0},
                                                   {"time_embedding_type", "positional"},
                                                   {"conv_in_kernel", 3},
                                                   {"conv_out_kernel", 3},
                                                   {"attention_type", "default"},
                                                   {"class_embeddings_concat", false},
                                                   {"addition_embed_type_num_heads", 64}};
  for (const auto& [key, value] : inactive) reader.refuse(key, value);
  for (const char* key :
       {"class_embed_type", "addition_embed_type", "num_class_embeds", "encoder_hid_dim",
        "encoder_hid_dim_type", "time_embedding_act_fn", "timestep_post_act", "time_cond_proj_dim",
        "projection_class_embeddings_input_dim", "addition_time_embed_dim", "num_attention_heads",
        "cross_attention_norm", "reverse_transformer_layers_per_block"})
    if (reader.has(key)) fail(kUnet, "{} = {} is not implemented", key, brief(reader.at(key)));
  if (reader.has("mid_block_only_cross_attention")) reader.refuse("mid_block_only_cross_attention", false);
}

void validate(const UnetConfig& c) {
  if (c.in_channels == kInpaintingChannels && c.out_channels == 4)
    fail(kUnet,
         "in_channels is 9: an inpainting U-Net, which takes a mask and a masked picture beside x_t; Kiln "
         "trains and samples those that take x_t alone");
  if (c.in_channels != c.out_channels)
    fail(kUnet, "expected in_channels and out_channels to be equal, got {} and {}", c.in_channels,
         c.out_channels);
  for (int64_t level = 0; level < c.num_levels(); ++level) {
    const int64_t width = c.block_out_channels[level], heads = c.num_heads[level];
    if (width < 1 || width % c.norm_num_groups != 0)
      fail(kUnet, "block_out_channels must be multiples of norm_num_groups {}, got {}", c.norm_num_groups,
           width);
    if (width % heads != 0)
      fail(kUnet,
           "block_out_channels must be multiples of attention_head_dim (the number of heads) {}, got {}",
           heads, width);
  }
  if (c.block_out_channels.front() % 2 != 0)
    fail(kUnet, "expected an even first width (timestep embedding), got {}", c.block_out_channels.front());
  if (!(c.norm_eps > 0) || c.time_embedding_dim < 0 || !std::isfinite(c.freq_shift) ||
      c.freq_shift >= static_cast<double>(c.block_out_channels.front()) / 2)
    fail(kUnet, "norm_eps, time_embedding_dim or freq_shift is out of range: {}, {}, {}", c.norm_eps,
         c.time_embedding_dim, c.freq_shift);
}

std::vector<std::string> block_types(const std::vector<bool>& attention, const char* with,
                                     const char* without) {
  std::vector<std::string> types;
  types.reserve(attention.size());
  for (const bool has_attention : attention) types.emplace_back(has_attention ? with : without);
  return types;
}

}  // namespace

const std::map<std::string, json>& unet_presets() {
  static const json sd15 = {{"cross_attention_dim", 768}};
  static const json sd21 = {{"sample_size", 96},
                            {"cross_attention_dim", 1024},
                            {"attention_head_dim", {5, 10, 20, 20}},
                            {"use_linear_projection", true},
                            {"upcast_attention", true}};
  static const std::map<std::string, json> presets = {
      {"unet2d_condition", json::object()}, {"sd15", sd15}, {"sd21-v", sd21}};
  return presets;
}

UnetConfig parse_unet_config(const json& config) {
  const JsonConfig reader(kUnet, config);
  UnetConfig c;
  c.sample_size = reader.positive("sample_size", c.sample_size);
  c.in_channels = reader.positive("in_channels", c.in_channels);
  c.out_channels = reader.positive("out_channels", c.out_channels);
  c.block_out_channels = reader.get("block_out_channels", c.block_out_channels);
  if (c.block_out_channels.empty()) fail(kUnet, "expected at least one of block_out_channels");
  const size_t levels = c.block_out_channels.size();
  c.down_attention = attention_of(reader, "down_block_types", "CrossAttnDownBlock2D", "DownBlock2D",
                                  c.down_attention, levels);
  c.up_attention =
      attention_of(reader, "up_block_types", "CrossAttnUpBlock2D", "UpBlock2D", c.up_attention, levels);
  c.layers_per_block = per_level(reader, "layers_per_block", levels, 2);
  c.transformer_layers_per_block = per_level(reader, "transformer_layers_per_block", levels, 1);
  c.num_heads = per_level(reader, "attention_head_dim", levels, 8);
  c.cross_attention_dim = reader.positive("cross_attention_dim", c.cross_attention_dim);
  c.norm_num_groups = reader.positive("norm_num_groups", c.norm_num_groups);
  KILN_GET_FIELDS(reader, c, norm_eps, use_linear_projection, upcast_attention, flip_sin_to_cos, freq_shift,
                  time_embedding_dim);
  refuse_variants(reader);
  reader.refuse_unknown();
  validate(c);
  return c;
}

json to_json(const UnetConfig& c) {
  json config = {{"down_block_types", block_types(c.down_attention, "CrossAttnDownBlock2D", "DownBlock2D")},
                 {"up_block_types", block_types(c.up_attention, "CrossAttnUpBlock2D", "UpBlock2D")},
                 {"attention_head_dim", c.num_heads}};
  KILN_WRITE_FIELDS(config, c, sample_size, in_channels, out_channels, block_out_channels, layers_per_block,
                    transformer_layers_per_block, cross_attention_dim, norm_num_groups, norm_eps,
                    use_linear_projection, upcast_attention, flip_sin_to_cos, freq_shift);
  if (c.time_embedding_dim > 0) config["time_embedding_dim"] = c.time_embedding_dim;
  // diffusers' own files have one number where all levels agree.
  for (const char* key : {"layers_per_block", "transformer_layers_per_block", "attention_head_dim"}) {
    const auto values = config[key].get<std::vector<int64_t>>();
    if (std::ranges::all_of(values, [&](int64_t value) { return value == values.front(); }))
      config[key] = values.front();
  }
  return config;
}

json complete_unet_config(const json& config, const WeightShapes& shapes) {
  json completed = config;
  const auto take = [&](const char* option, const char* key, size_t dim) {
    const auto found = shapes.find(key);
    if (!config.contains(option) && found != shapes.end() && dim < found->second.size())
      completed[option] = found->second[dim];
  };
  take("in_channels", "conv_in.weight", 1);
  take("out_channels", "conv_out.weight", 0);
  take("cross_attention_dim", "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight", 1);
  const auto projection = shapes.find("mid_block.attentions.0.proj_in.weight");
  if (!config.contains("use_linear_projection") && projection != shapes.end())
    completed["use_linear_projection"] = projection->second.size() == 2;
  return completed;
}

json fit_unet_config(const json& config, const ModelNeeds& needs) {
  if (needs.learns_sigma)
    fail(kUnet, "the U-Net predicts no sigma: choose --objective epsilon or v_prediction");
  for (const int64_t given : {needs.hidden_size, needs.depth, needs.num_heads, needs.patch_size})
    if (given > 0)
      fail(kUnet,
           "--hidden-size, --depth, --num-heads and --patch-size are for transformers: give "
           "--model-config '{{\"block_out_channels\": [..]}}'");
  if (needs.position_scale > 0) fail(kUnet, "--position-scale: a U-Net has no positions to scale");
  json fitted = config;
  fitted["sample_size"] = needs.side;
  fitted["in_channels"] = fitted["out_channels"] = needs.channels;
  if (needs.text_width > 0) fitted["cross_attention_dim"] = needs.text_width;
  return fitted;
}

}  // namespace kiln
