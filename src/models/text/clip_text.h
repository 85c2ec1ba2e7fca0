// CLIP's text encoder (Radford et al. 2021) and OpenCLIP's, in transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// `config`: transformers' config.json of a CLIPTextModel, or of a whole CLIP with its text_config. The pooled
// vector is that of the end token: of the highest id where eos_token_id is 2, which old configs say wrongly,
// else of the first eos_token_id. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_clip_text(const nlohmann::json& config, const BuildOptions& options);
// Takes the encoder's tensors out of a file's, under its keys, which begin with "text_model." but may come
// without it; the picture's half, projections and position_ids may be there.
std::map<std::string, at::Tensor> clip_text_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
