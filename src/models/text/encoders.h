// The text encoders with transformers' configs and keys, each a row of text_registry.cpp.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "core/json.h"
#include "models/text/text_encoder.h"

namespace kiln {

// BERT and sentence encoders built on it, such as MiniLM (Devlin et al. 2019; Reimers & Gurevych 2019).
// Builds the encoder from transformers' config.json of a BertModel. The pooled vector is the mean over the
// tokens that count, normalised to length 1. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_bert(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys. In the file these may begin with "bert.";
// heads, the pooler and position_ids are left out.
std::map<std::string, at::Tensor> bert_weights(const std::map<std::string, at::Tensor>& weights);

// The text encoders of CLIP (Radford et al. 2021) and OpenCLIP.
// Builds the encoder from transformers' config.json of a CLIPTextModel, or of a whole CLIP with its
// text_config. The pooled vector is that of the end token, the first eos_token_id. Old configs wrongly say 2;
// then the end token is the highest id. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_clip_text(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys, which begin with "text_model."; the
// file's may lack that. The picture encoder, projections and position_ids are left out.
std::map<std::string, at::Tensor> clip_text_weights(const std::map<std::string, at::Tensor>& weights);

// Gemma 2 as a text encoder (Riviere et al. 2024): the decoder's features after the final norm.
// Builds the encoder from transformers' config.json of a Gemma2Model. Throws Error naming the key.
std::unique_ptr<TextEncoder> build_gemma2(const nlohmann::json& config, const BuildOptions& options);
// Returns a file's tensors under the keys of Gemma2Model. In the file these may begin with "model."; lm_head
// is left out.
std::map<std::string, at::Tensor> gemma2_weights(const std::map<std::string, at::Tensor>& weights);

// The encoder of T5 and T5 v1.1 (Raffel et al. 2020; Shazeer 2020).
// Builds the encoder from transformers' config.json of a T5EncoderModel or of the whole model. Throws Error
// naming the key.
std::unique_ptr<TextEncoder> build_t5_encoder(const nlohmann::json& config, const BuildOptions& options);
// Returns the encoder's tensors of a file under the encoder's keys. The file may call the table shared.weight
// or encoder.embed_tokens.weight; a decoder is left out.
std::map<std::string, at::Tensor> t5_encoder_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
