// A diffusers DiTPipeline folder.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "convert/dit_diffusers.h"

namespace kiln {

struct DiffusersFolderOptions {
  std::string vae{};  // folder of an AutoencoderKL, copied; "" = the pipeline is written without one
  nlohmann::json objective = {{"type", "iddpm"}};  // make_objective's config: chooses the scheduler
  std::vector<std::string> class_names{};          // the pipeline's labels; may be empty
};

// model_index.json, transformer/, scheduler/ and vae/. Written beside, then renamed; `folder` must not exist.
// `weights` are in the published keys. Throws Error.
void write_dit_pipeline(const std::string& folder, const DitConfig& config, const TensorMap& weights,
                        const DiffusersFolderOptions& options);

}  // namespace kiln
