// UNet2DConditionModel, the denoiser of Stable Diffusion 1.x and 2.x (Rombach et al. 2022), as diffusers
// names its config and its weights. Segments: embed, down.I.J, mid, up.I.J, final. J counts the resnets of
// a level; each segment has one, with the transformer after it. On the way down the last segment of a level
// halves the size, except in the lowest level. On the way up the first segment of the next level enlarges,
// because it pops a skip of the new size.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "core/json.h"
#include "models/denoisers/unet/unet_config.h"

namespace kiln {

// Returns the original Stable Diffusion key of a diffusers key of this config's model, with the prefix
// "model.diffusion_model.". Kiln's keys are diffusers'.
std::string original_unet_key(const UnetConfig& config, const std::string& key);
// Returns a file's tensors under diffusers' keys. From a single-file checkpoint it takes the U-Net alone: not
// the text encoder, the VAE, the schedule or the "model_ema" copy. Tensors under other keys are returned as
// they are.
TensorMap current_unet_weights(const UnetConfig& config, const TensorMap& weights);

// Family::recognise, of diffusers' keys and of a single-file checkpoint's.
std::optional<RecognisedModel> recognise_unet(const WeightShapes& shapes, const nlohmann::json& hints);
// Reads and writes the keys of single-file checkpoints, as an entry of Family::file_keys.
FileKeys unet_file_keys();
// Reads and writes diffusers' folder, as an entry of Family::formats.
ForeignFormat unet_diffusers_format();

// The model takes captions with the same number of rows for all samples: Stable Diffusion attends to all 77,
// padding included.
std::unique_ptr<Denoiser> build_unet(const UnetConfig& config, const BuildOptions& options);

}  // namespace kiln
