// The encoder of T5 and T5 v1.1 (Raffel et al. 2020; Shazeer 2020), in transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// `config`: transformers' config.json of T5EncoderModel or of the whole model. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_t5_encoder(const nlohmann::json& config, const BuildOptions& options);
// Takes the encoder's tensors out of a file's, under its keys: the table may be called shared.weight or
// encoder.embed_tokens.weight, and a decoder may be there.
std::map<std::string, at::Tensor> t5_encoder_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
