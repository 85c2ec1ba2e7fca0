// Gemma 2 as a text encoder (Riviere et al. 2024): the decoder's features after the final norm, with
// transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// Builds the encoder from transformers' config.json of a Gemma2Model. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_gemma2(const nlohmann::json& config, const BuildOptions& options);
// Returns a file's tensors under the keys of Gemma2Model. In the file these may begin with "model."; lm_head
// is left out.
std::map<std::string, at::Tensor> gemma2_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
