// The text encoders of CLIP (Radford et al. 2021) and OpenCLIP, with transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// Builds the encoder from transformers' config.json of a CLIPTextModel, or of a whole CLIP with its
// text_config. The pooled vector is that of the end token, the first eos_token_id. Old configs wrongly say 2;
// then the end token is the highest id. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_clip_text(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys, which begin with "text_model."; the
// file's may lack that. The picture encoder, projections and position_ids are left out.
std::map<std::string, at::Tensor> clip_text_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
