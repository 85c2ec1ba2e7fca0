// The registry of text encoders by name: an explicit table. Configs and keys are transformers'.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/text/text_encoder.h"

namespace kiln {

// True if `name` is one of text_encoder_names(): t5_encoder, bert, clip_text, gemma2.
bool is_text_encoder(const std::string& name);
std::vector<std::string> text_encoder_names();
// Builds an encoder without loading weights. Throws Error for an unknown name or an unsupported config.
std::unique_ptr<TextEncoder> build_text_encoder(const std::string& name, const nlohmann::json& config,
                                                const BuildOptions& options = {});
// Returns a file's tensors under the encoder's keys. Adds or removes prefixes that files lack or have, and
// leaves out tensors of other parts.
std::map<std::string, at::Tensor> text_encoder_weights(const std::string& name,
                                                       const std::map<std::string, at::Tensor>& weights);

// The classes of transformers that read an encoder and its tokenizer.
struct TransformersClasses {
  const char *model, *tokenizer;
};
// Throws Error for an unknown name.
const TransformersClasses& transformers_classes(const std::string& name);

// A published model.
struct PublishedTextEncoder {
  const char* name;  // of its key inventory: "t5-v1_1-xxl-encoder"
  const char* family;
  nlohmann::json config;
};
const std::vector<PublishedTextEncoder>& published_text_encoders();

// An encoder for inference whose weights are still in their files.
struct OpenedTextEncoder {
  std::unique_ptr<TextEncoder> encoder;        // has its weights on meta in their final dtypes
  std::map<std::string, at::Tensor> stored{};  // the mapped values of weights by key
  std::string fingerprint{};                   // "xxh3:..." of the f32 values, whatever dtype stores them
  double read_seconds = 0;                     // seconds that reading all weights took
  std::string weights_path{};

  // Reads all weights. On a CPU values of the right dtype are used where they are mapped, not copied.
  void load(at::Device device);
};
// Opens an encoder. `folder` holds config.json and weights (model.safetensors, an index of shards,
// pytorch_model.bin), or is a pipeline's folder with text_encoder/ in it. Weights of products will be in
// `compute_dtype`, the others in f32. Without `hashes_weights`, which reads them all, it has no fingerprint.
// Throws Error.
OpenedTextEncoder open_text_encoder(const std::string& folder, at::ScalarType compute_dtype,
                                    bool hashes_weights = true);

// Makes an encoder from the config alone. Weights are on meta in their final dtypes.
std::unique_ptr<TextEncoder> outline_text_encoder(const std::string& folder, at::ScalarType compute_dtype);
std::unique_ptr<TextEncoder> outline_text_encoder(const PublishedTextEncoder& published,
                                                  at::ScalarType compute_dtype);
// Returns the bytes that the weights take in memory.
int64_t weight_bytes(const TextEncoder& encoder);

}  // namespace kiln
