// BERT and the sentence encoders built on it, such as MiniLM (Devlin et al. 2019; Reimers & Gurevych 2019),
// in transformers' config and keys.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/text/text_encoder.h"

namespace kiln {

// `config`: transformers' config.json of a BertModel. The pooled vector is the mean over the tokens that
// count, normalised to length 1. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_bert(const nlohmann::json& config, const BuildOptions& options);
// Takes the encoder's tensors out of a file's, under its keys: they may begin with "bert.", and heads, the
// pooler and position_ids may be there.
std::map<std::string, at::Tensor> bert_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
