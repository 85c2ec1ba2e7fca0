// UNet2DConditionModel, the denoiser of Stable Diffusion 1.x and 2.x (Rombach et al. 2022), as diffusers
// names its config and its weights. Segments: embed, down.I.J, mid, up.I.J, final; J counts the resnets of a
// level, each with the transformer after it. A level's change of size belongs to the segment that ends the
// level on the way down, and to the one that begins the next on the way up, which pops a skip of the size to
// reach.
#pragma once
#include <memory>

#include "models/denoisers/unet_config.h"
#include "models/model.h"

namespace kiln {

// Captions are rows of equal length for all samples: Stable Diffusion attends to all 77, padding included.
std::unique_ptr<Denoiser> build_unet(const UnetConfig& config, const BuildOptions& options);

}  // namespace kiln
