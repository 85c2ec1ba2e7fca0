// BERT and sentence encoders built on it, such as MiniLM (Devlin et al. 2019; Reimers & Gurevych 2019), with
// transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// Builds the encoder from transformers' config.json of a BertModel. The pooled vector is the mean over the
// tokens that count, normalised to length 1. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_bert(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys. In the file these may begin with "bert.";
// heads, the pooler and position_ids are left out.
std::map<std::string, at::Tensor> bert_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
