#include <cmath>

#include "core/error.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/model_config.h"

namespace kiln {
namespace {

constexpr const char* kWho = "autoencoder_kl";

void require_all(const std::vector<std::string>& types, const char* key, const std::string& expected) {
  for (const std::string& type : types)
    if (type != expected) fail(kWho, "config key {} holds {}; only {} is built", key, type, expected);
}

}  // namespace

AutoencoderKlConfig parse_autoencoder_kl_config(const nlohmann::json& config) {
  ConfigReader reader(config, kWho);
  AutoencoderKlConfig c;
  c.in_channels = reader.integer("in_channels", c.in_channels);
  c.out_channels = reader.integer("out_channels", c.out_channels);
  c.block_out_channels = reader.integers("block_out_channels", c.block_out_channels);
  c.layers_per_block = reader.integer("layers_per_block", c.layers_per_block);
  c.latent_channels = reader.integer("latent_channels", c.latent_channels);
  c.norm_num_groups = reader.integer("norm_num_groups", c.norm_num_groups);
  c.scaling_factor = reader.number("scaling_factor", c.scaling_factor);
  c.shift_factor = reader.number("shift_factor", c.shift_factor);
  c.use_quant_conv = reader.boolean("use_quant_conv", c.use_quant_conv);
  c.use_post_quant_conv = reader.boolean("use_post_quant_conv", c.use_post_quant_conv);
  c.mid_block_add_attention = reader.boolean("mid_block_add_attention", c.mid_block_add_attention);

  if (c.in_channels <= 0 || c.out_channels <= 0 || c.layers_per_block <= 0 || c.latent_channels <= 0 ||
      c.norm_num_groups <= 0 || c.block_out_channels.empty())
    fail(kWho,
         "in_channels, out_channels, layers_per_block, latent_channels, norm_num_groups and the number of "
         "block_out_channels must be > 0");
  for (const int64_t width : c.block_out_channels)
    if (width <= 0 || width % c.norm_num_groups != 0)
      fail(kWho, "block_out_channels must be multiples of norm_num_groups {}, got {}", c.norm_num_groups,
           width);
  const std::string activation = reader.text("act_fn", "silu");
  if (activation != "silu" && activation != "swish")
    fail(kWho, "config key act_fn is {}; only silu is built", activation);
  require_all(reader.texts("down_block_types", {}), "down_block_types", "DownEncoderBlock2D");
  require_all(reader.texts("up_block_types", {}), "up_block_types", "UpDecoderBlock2D");
  for (const char* key : {"latents_mean", "latents_std"})
    if (config.contains(key) && !config[key].is_null())
      fail(kWho, "config key {} is set; only scaling_factor and shift_factor are built", key);
  if (!(c.scaling_factor > 0) || !std::isfinite(c.shift_factor))
    fail(kWho, "expected scaling_factor > 0 and a finite shift_factor, got {} and {}", c.scaling_factor,
         c.shift_factor);
  return c;
}

}  // namespace kiln
