// The U-Net's weights in the keys of the original Stable Diffusion files
// (model.diffusion_model.input_blocks..), as they lie in single-file checkpoints, and in diffusers' keys,
// which are Kiln's.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "models/denoisers/unet.h"

namespace kiln {

// "model.diffusion_model." and the original key of a diffusers key of a model of this config.
std::string original_unet_key(const UnetConfig& config, const std::string& key);

// A file's tensors under diffusers' keys. Of a single-file checkpoint only the U-Net is taken: not its text
// encoder, its VAE, its schedule or its "model_ema" copy. Tensors under other keys are returned as they are.
std::map<std::string, at::Tensor> current_unet_weights(const UnetConfig& config,
                                                       const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
