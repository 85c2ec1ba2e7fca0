// Gemma 2 as a text encoder (Riviere et al. 2024): the decoder's features after the final norm, in
// transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// `config`: transformers' config.json of a Gemma2Model. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_gemma2(const nlohmann::json& config, const BuildOptions& options);
// The file's tensors under the keys of Gemma2Model, which may begin with "model."; lm_head may be there.
std::map<std::string, at::Tensor> gemma2_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
