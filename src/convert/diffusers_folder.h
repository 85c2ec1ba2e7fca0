// Writes the folder of a diffusers pipeline.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/family.h"

namespace kiln {

struct DiffusersFolderOptions {
  std::string vae{};  // folder of an AutoencoderKL, copied; "" = the pipeline is written without one
  nlohmann::json objective = {{"type", "iddpm"}};  // make_objective's config: chooses the scheduler
  std::vector<std::string> class_names{};          // the pipeline's labels; may be empty
};

// Writes model_index.json, the model's own folder, scheduler/ and vae/ to a partial folder, then renames it.
// `folder` must not exist. `weights` have the published keys. Throws Error.
void write_diffusers_pipeline(const std::string& folder, const ForeignFormat& format,
                              const nlohmann::json& config, const TensorMap& weights,
                              const DiffusersFolderOptions& options);

}  // namespace kiln
