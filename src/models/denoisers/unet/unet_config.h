// The config of UNet2DConditionModel (models/denoisers/unet/unet.h), as diffusers names it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/family.h"

namespace kiln {

// diffusers' config.json. The defaults are diffusers' own for keys that a file leaves out. Lists have an
// entry per level.
struct UnetConfig {
  int64_t sample_size = 64;  // side of the latents that the model was made for; it also takes others
  int64_t in_channels = 4, out_channels = 4;
  std::vector<int64_t> block_out_channels = {320, 640, 1280, 1280};
  std::vector<bool> down_attention = {true, true, true, false};
  std::vector<bool> up_attention = {false, true, true, true};
  std::vector<int64_t> layers_per_block = {2, 2, 2, 2};
  std::vector<int64_t> transformer_layers_per_block = {1, 1, 1, 1};
  std::vector<int64_t> num_heads = {8, 8, 8, 8};  // diffusers calls it "attention_head_dim"
  int64_t cross_attention_dim = 1280;             // width of the captions
  int64_t norm_num_groups = 32;
  double norm_eps = 1e-5;
  bool use_linear_projection = false;  // proj_in and proj_out are Linears, not 1x1 convolutions
  bool upcast_attention = false;       // scores in f32; here they always are
  bool flip_sin_to_cos = true;
  double freq_shift = 0;
  int64_t time_embedding_dim = 0;  // 0: four times the first width

  int64_t num_levels() const { return static_cast<int64_t>(block_out_channels.size()); }
  int64_t time_width() const {
    return time_embedding_dim > 0 ? time_embedding_dim : 4 * block_out_channels.front();
  }
};

// Settings by name: "unet2d_condition" (diffusers' defaults), "sd15" and "sd21-v".
const std::map<std::string, nlohmann::json>& unet_presets();

// Throws Error naming the key for values that do not fit together and for what is not implemented, such as
// inpainting models (9 channels).
UnetConfig parse_unet_config(const nlohmann::json& config);
nlohmann::json to_json(const UnetConfig& config);
// Adds in_channels, out_channels, cross_attention_dim and use_linear_projection, where `config` lacks them
// and the shapes of weights determine them.
nlohmann::json complete_unet_config(const nlohmann::json& config, const WeightShapes& shapes);
// Family::fit.
nlohmann::json fit_unet_config(const nlohmann::json& config, const ModelNeeds& needs);

}  // namespace kiln
