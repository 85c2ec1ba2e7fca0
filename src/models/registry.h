// Every denoiser by name: an explicit table of families. The config is JSON: a name's preset, overridden by
// the given keys.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "models/family.h"
#include "models/model.h"
#include "models/weights.h"

namespace kiln {

std::span<const Family> denoiser_families();
// Adds a family of a program's own, before the registry is first asked for it. A program does so before it
// starts threads.
void add_denoiser_family(Family family);
// The family of a preset. Throws Error listing the known names.
const Family& family_of(const std::string& name);

// name: "DiT-XL/2" and the like, or a family's own with a full config. Throws Error listing the known names.
std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const nlohmann::json& config,
                                         const BuildOptions& options = {});
// The full config that `name` and `config` resolve to (what is saved with a run).
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config);
// The same for weights of these shapes, which tell some of what `config` leaves open. Throws Error naming the
// key and its value where they contradict it.
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config,
                                       const WeightShapes& shapes);
// The same for what a run needs.
nlohmann::json fit_denoiser_config(const std::string& name, const nlohmann::json& config,
                                   const ModelNeeds& needs);
std::vector<std::string> denoiser_names();

// The preset that `config` is a model of, or the family's own name.
std::string preset_name(const Family& family, const nlohmann::json& config);

struct RecognisedDenoiser {
  const Family* family;
  RecognisedModel model;
};
// The family whose keys and shapes these are; nothing for an unknown architecture. `hints`: a config as far
// as it is known.
std::optional<RecognisedDenoiser> recognise_denoiser(const WeightShapes& shapes, const nlohmann::json& hints);

// The family's keys of a file's weights; {} where the file has the model's own.
const FileKeys* file_keys_of(const Family& family, const TensorMap& weights);
// A file's weights in the model's keys. Throws Error.
TensorMap model_weights(const Family& family, const nlohmann::json& config, const TensorMap& weights,
                        const std::string& source);

// The family that reads weights of this class of diffusers; {} for an unknown one.
struct ForeignFamily {
  const Family* family = nullptr;
  const ForeignFormat* format = nullptr;
};
ForeignFamily foreign_family(const std::string& class_name);

}  // namespace kiln
