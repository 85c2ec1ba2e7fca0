// Every model by name: an explicit table. The config is JSON: a name's preset, overridden by the given keys.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/model.h"
#include "models/weights.h"

namespace kiln {

using WeightShapes = std::map<std::string, std::vector<int64_t>>;  // by published key

// name: "dit" with a full config, or "DiT-XL/2" etc. Throws Error listing the known names.
std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const nlohmann::json& config,
                                         const BuildOptions& options = {});
// The full config that `name` and `config` resolve to (what is saved with a run).
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config);
// The same for weights of these shapes, which tell some of what `config` leaves open (channels, a learned
// sigma). Throws Error naming the key and its value where they contradict the number of classes, which
// decides what the null class is and so is never guessed.
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config,
                                       const WeightShapes& shapes);
std::vector<std::string> denoiser_names();

}  // namespace kiln
