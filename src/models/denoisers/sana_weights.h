// Sana's weights in the keys of its repository and in those of diffusers' SanaTransformer2DModel, which are
// Kiln's.
#pragma once
#include <optional>
#include <string>

#include "models/denoisers/sana.h"
#include "models/parts/key_map.h"

namespace kiln {

// Family::recognise, of either set of keys.
std::optional<RecognisedModel> recognise_sana(const WeightShapes& shapes, const nlohmann::json& hints);

// The repository's keys are the fused set. What it saves beside the model (the null caption, a position table
// that is not used, the head of the loss's variance) is left out.
KeyMap sana_key_map(const SanaConfig& config);

// The repository's keys as a row of the family's, diffusers' folder as one of its formats.
FileKeys sana_file_keys();
ForeignFormat sana_diffusers_format();

}  // namespace kiln
