#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "models/autoencoders/autoencoder_kl.h"

namespace kiln {
namespace {

constexpr const char* kWho = "autoencoder_kl";

// Checks that there is one block type per level, each of the only kind that is built.
void check_block_types(const JsonConfig& reader, const char* key, const std::string& expected,
                       size_t num_levels) {
  const auto types = reader.get(key, std::vector<std::string>(num_levels, expected));
  for (const std::string& type : types)
    if (type != expected) fail(kWho, "config key {} holds {}; only {} is built", key, type, expected);
  if (types.size() != num_levels)
    fail(kWho, "expected {} {}, one per block_out_channels, got {}", num_levels, key, types.size());
}

}  // namespace

const nlohmann::json& sd_vae_config() {
  static const nlohmann::json kConfig = {{"block_out_channels", {128, 256, 512, 512}},
                                         {"layers_per_block", 2}};
  return kConfig;
}

AutoencoderKlConfig parse_autoencoder_kl_config(const nlohmann::json& config) {
  const JsonConfig reader(kWho, config);
  // diffusers' defaults for keys that a file leaves out.
  AutoencoderKlConfig c{.block_out_channels = {64}, .layers_per_block = 1};
  c.in_channels = reader.get("in_channels", c.in_channels);
  c.out_channels = reader.get("out_channels", c.out_channels);
  c.block_out_channels = reader.get("block_out_channels", c.block_out_channels);
  c.layers_per_block = reader.get("layers_per_block", c.layers_per_block);
  c.latent_channels = reader.get("latent_channels", c.latent_channels);
  c.norm_num_groups = reader.get("norm_num_groups", c.norm_num_groups);
  c.scaling_factor = reader.get("scaling_factor", c.scaling_factor);
  c.shift_factor = reader.get("shift_factor", c.shift_factor);
  c.use_quant_conv = reader.get("use_quant_conv", c.use_quant_conv);
  c.use_post_quant_conv = reader.get("use_post_quant_conv", c.use_post_quant_conv);
  c.mid_block_add_attention = reader.get("mid_block_add_attention", c.mid_block_add_attention);

  if (c.in_channels <= 0 || c.out_channels <= 0 || c.layers_per_block <= 0 || c.latent_channels <= 0 ||
      c.norm_num_groups <= 0 || c.block_out_channels.empty())
    fail(kWho,
         "in_channels, out_channels, layers_per_block, latent_channels, norm_num_groups and the number of "
         "block_out_channels must be > 0");
  for (const int64_t width : c.block_out_channels)
    if (width <= 0 || width % c.norm_num_groups != 0)
      fail(kWho, "block_out_channels must be multiples of norm_num_groups {}, got {}", c.norm_num_groups,
           width);
  const std::string activation = reader.get<std::string>("act_fn", "silu");
  if (activation != "silu" && activation != "swish")
    fail(kWho, "config key act_fn is {}; only silu is built", activation);
  check_block_types(reader, "down_block_types", "DownEncoderBlock2D", c.block_out_channels.size());
  check_block_types(reader, "up_block_types", "UpDecoderBlock2D", c.block_out_channels.size());
  for (const char* key : {"latents_mean", "latents_std"})
    if (reader.has(key))
      fail(kWho, "config key {} is set; only scaling_factor and shift_factor are built", key);
  if (!(c.scaling_factor > 0) || !std::isfinite(c.shift_factor))
    fail(kWho, "expected scaling_factor > 0 and a finite shift_factor, got {} and {}", c.scaling_factor,
         c.shift_factor);
  return c;
}

}  // namespace kiln
