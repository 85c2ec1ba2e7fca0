// The registry of denoisers by name: an explicit table of families. A config is JSON: the preset of a name,
// overridden by the given keys.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/family.h"
#include "models/model.h"
#include "models/weights.h"

namespace kiln {

std::span<const Family> denoiser_families();
// Adds a program's own family. Call it before the registry is first asked for the family and before the
// program starts threads.
void add_denoiser_family(Family family);
// Returns the family of a preset. Throws Error listing the known names.
const Family& family_of(const std::string& name);

// Builds a denoiser. `name`: a preset such as "DiT-XL/2", or a family's own name with a full config. Throws
// Error listing the known names.
std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const nlohmann::json& config,
                                         const BuildOptions& options = {});
// Returns the full config of `name` and `config`, as it is saved with a run.
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config);
// Also fills what `config` leaves open from the shapes of weights. Throws Error naming the key and its value
// where the shapes contradict `config`.
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config,
                                       const WeightShapes& shapes);
// Returns the full config for what a run needs.
nlohmann::json fit_denoiser_config(const std::string& name, const nlohmann::json& config,
                                   const ModelNeeds& needs);
std::vector<std::string> denoiser_names();
// Returns the side in pixels of the pictures that a model is made for: the preset's own, unless `config` says
// another. Throws Error listing the known names.
int64_t own_image_size(const std::string& name, const nlohmann::json& config = {});
// Returns all names for people: "dit (DiT-B/2, ...), pixart (...)".
std::string denoiser_names_text();

// Returns the first row of a family's table that is about the model of this name, or null.
template <class Row>
const Row* row_of(const std::vector<Row>& rows, const std::string& name) {
  for (const Row& row : rows)
    if (name.starts_with(row.model)) return &row;
  return nullptr;
}

// Returns the preset whose settings `config` has, or the family's own name.
std::string preset_name(const Family& family, const nlohmann::json& config);

struct RecognisedDenoiser {
  const Family* family;
  RecognisedModel model;
};
// Finds the family that has these keys and shapes. Returns nothing for an unknown architecture. `hints`: the
// known part of the config.
std::optional<RecognisedDenoiser> recognise_denoiser(const WeightShapes& shapes, const nlohmann::json& hints);

// Returns the family's entry for the keys of a file's weights, or null if they are the model's own.
const FileKeys* file_keys_of(const Family& family, const TensorMap& weights);
// Returns a file's weights under the model's keys. Throws Error.
TensorMap model_weights(const Family& family, const nlohmann::json& config, const TensorMap& weights,
                        const std::string& source);

struct ForeignFamily {
  const Family* family = nullptr;
  const ForeignFormat* format = nullptr;
};
// Finds the family that reads weights of this diffusers class. Both pointers are null for an unknown class.
ForeignFamily foreign_family(const std::string& class_name);
// Returns the folders of pipelines that hold a denoiser: "transformer", "unet".
std::vector<std::string> denoiser_components();

}  // namespace kiln
