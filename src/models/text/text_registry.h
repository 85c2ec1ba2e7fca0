// Every text encoder by name: an explicit table. Configs and keys are transformers'.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/text/text_encoder.h"

namespace kiln {

// Whether `name` is one of text_encoder_names(): t5_encoder, bert, clip_text, gemma2.
bool is_text_encoder(const std::string& name);
std::vector<std::string> text_encoder_names();
// Weights are not loaded. Throws Error for an unknown name or a config that is not built.
std::unique_ptr<TextEncoder> build_text_encoder(const std::string& name, const nlohmann::json& config,
                                                const BuildOptions& options = {});
// A file's tensors as the encoder names them: prefixes that some files have or lack, without what is no part
// of it.
std::map<std::string, at::Tensor> text_encoder_weights(const std::string& name,
                                                       const std::map<std::string, at::Tensor>& weights);

// Published models by the names of their key inventories ("t5-v1_1-xxl-encoder"), and what they are.
struct PublishedTextEncoder {
  const char* name;
  const char* family;
  nlohmann::json config;
};
const std::vector<PublishedTextEncoder>& published_text_encoders();

struct LoadedTextEncoder {
  std::unique_ptr<TextEncoder> encoder;
  std::string fingerprint{};  // "xxh3:..." of its weights, the same for all storage dtypes of equal values
};
// For inference. `folder`: config.json and weights (model.safetensors, an index of shards,
// pytorch_model.bin), or a pipeline's folder with text_encoder/ in it. Weights of products are kept in
// `compute_dtype`, the others in f32; what a file holds in the right dtype is used where it is mapped, not
// copied. Throws Error.
LoadedTextEncoder load_text_encoder(const std::string& folder, at::Device device,
                                    at::ScalarType compute_dtype);

}  // namespace kiln
