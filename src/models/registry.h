// Every model by name: an explicit table. The config is JSON: a name's preset, overridden by the given keys.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/model.h"
#include "models/weights.h"

namespace kiln {

// name: "dit" with a full config, or "DiT-XL/2" etc. Throws Error listing the known names.
std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const nlohmann::json& config,
                                         const BuildOptions& options = {});
// The full config that `name` and `config` resolve to (what is saved with a run).
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config);
std::vector<std::string> denoiser_names();

}  // namespace kiln
