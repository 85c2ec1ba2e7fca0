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

// An encoder for inference whose weights are still in their files.
struct OpenedTextEncoder {
  std::unique_ptr<TextEncoder> encoder;        // its weights are on meta, of the dtypes they are to have
  std::map<std::string, at::Tensor> stored{};  // their values by key, mapped
  std::string fingerprint{};  // "xxh3:..." of its weights, the same for all storage dtypes of equal values
  double read_seconds = 0;    // that reading all of them took
  std::string weights_path{};

  // Reads all weights. What a file holds in the right dtype is used where it is mapped, not copied.
  void load(at::Device device);
};
// `folder`: config.json and weights (model.safetensors, an index of shards, pytorch_model.bin), or a
// pipeline's folder with text_encoder/ in it. Weights of products are to be in `compute_dtype`, the others in
// f32. Throws Error.
OpenedTextEncoder open_text_encoder(const std::string& folder, at::ScalarType compute_dtype);

// The same from config.json alone: weights are on meta, of the dtypes that they are to have.
std::unique_ptr<TextEncoder> outline_text_encoder(const std::string& folder, at::ScalarType compute_dtype);
std::unique_ptr<TextEncoder> outline_text_encoder(const PublishedTextEncoder& published,
                                                  at::ScalarType compute_dtype);
int64_t weight_bytes(const TextEncoder& encoder);  // in memory

}  // namespace kiln
