// DiT's weights between the published keys and those of diffusers' DiTTransformer2DModel.
#pragma once
#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>
#include <string>

#include "models/denoisers/dit.h"
#include "models/parts/key_map.h"

namespace kiln {

// diffusers keeps a copy of the timestep and label embedders in every block, and has no pos_embed in its
// files: it computes the table, so one that was changed is refused. Throws Error for what the class cannot
// express.
TensorMap dit_to_diffusers(const DitConfig& config, const TensorMap& weights);
nlohmann::json dit_diffusers_config(const DitConfig& config);

// The inverse. Throws Error listing missing and unknown keys, and when the embedders of the blocks differ.
TensorMap dit_from_diffusers(const DitConfig& config, const TensorMap& weights, const std::string& source);
// Throws Error naming a setting that DiT does not have.
DitConfig parse_dit_diffusers_config(const nlohmann::json& config, const std::string& source);

// The above as a row of the family's formats.
ForeignFormat dit_diffusers_format();

}  // namespace kiln
