// The encoder of T5 and T5 v1.1 (Raffel et al. 2020; Shazeer 2020), with transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// Builds the encoder from transformers' config.json of a T5EncoderModel or of the whole model. Throws Error
// naming the key.
std::unique_ptr<TextEncoder> build_t5_encoder(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys. The file may call the table shared.weight
// or encoder.embed_tokens.weight; a decoder is left out.
std::map<std::string, at::Tensor> t5_encoder_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
