// PixArt's weights in the repository's keys and in those of diffusers' PixArtTransformer2DModel.
#pragma once
#include <optional>
#include <string>

#include "models/denoisers/pixart.h"
#include "models/parts/key_map.h"

namespace kiln {

// Family::recognise, of the repository's keys and of diffusers'.
std::optional<RecognisedModel> recognise_pixart(const WeightShapes& shapes, const nlohmann::json& hints);
std::optional<RecognisedModel> recognise_pixart_diffusers(const WeightShapes& shapes,
                                                          const nlohmann::json& hints);

// The repository's keys are the fused set. Neither qk norm nor compression has keys in diffusers.
KeyMap pixart_key_map(const PixartConfig& config);

// Throws Error for what diffusers' class cannot express. The null caption has no place there: pipelines
// encode
// "".
TensorMap pixart_to_diffusers(const PixartConfig& config, const TensorMap& weights,
                              const std::string& source);
// The inverse, with the position table, and zeros for the null caption.
TensorMap pixart_from_diffusers(const PixartConfig& config, const TensorMap& weights,
                                const std::string& source);
// The config in the repository's names of a model in diffusers'.
PixartConfig in_repository_keys(PixartConfig config);

// The above as a row of the family's formats.
ForeignFormat pixart_diffusers_format();
// A position table that a model of any size computes itself is left out, whichever size it was saved for.
FileKeys pixart_file_keys();

}  // namespace kiln
