// A diffusers DiTPipeline folder.
#pragma once
#include <string>

#include "convert/dit_diffusers.h"

namespace kiln {

struct DiffusersFolderOptions {
  std::string vae;        // folder of an AutoencoderKL, copied; "" = the pipeline is written without one
  std::string objective;  // iddpm | epsilon | v_prediction | x_0 | flow: chooses the scheduler
};

// model_index.json, transformer/, scheduler/ and vae/. Written beside, then renamed; `folder` must not exist.
// `weights` are in the published keys. Throws Error.
void write_dit_pipeline(const std::string& folder, const DitConfig& config, const TensorMap& weights,
                        const DiffusersFolderOptions& options);

}  // namespace kiln
