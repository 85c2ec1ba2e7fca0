#include "models/text/text_registry.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>
#include <memory>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "models/text/encoders.h"
#include "models/weights.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Weights = std::map<std::string, at::Tensor>;

struct TextFamily {
  const char* name;
  std::vector<std::string> model_types;  // "model_type" of transformers' config.json
  std::unique_ptr<TextEncoder> (*build)(const json& config, const BuildOptions& options);
  Weights (*weights)(const Weights& published);
  TransformersClasses classes;
};

const std::vector<TextFamily>& text_families() {
  static const std::vector<TextFamily> all = {
      {"t5_encoder", {"t5"}, build_t5_encoder, t5_encoder_weights, {"T5EncoderModel", "T5Tokenizer"}},
      {"bert", {"bert"}, build_bert, bert_weights, {"BertModel", "BertTokenizer"}},
      {"clip_text",
       {"clip_text_model", "clip"},
       build_clip_text,
       clip_text_weights,
       {"CLIPTextModel", "CLIPTokenizer"}},
      {"gemma2", {"gemma2"}, build_gemma2, gemma2_weights, {"Gemma2Model", "GemmaTokenizer"}},
  };
  return all;
}

const TextFamily& text_family_of(const std::string& name) {
  for (const TextFamily& family : text_families())
    if (name == family.name) return family;
  const std::vector<std::string> known = text_encoder_names();
  fail("text", "unknown text encoder {:?}: did you mean {:?}? (known are {})", name,
       nearest_name(name, known), fmt::join(known, ", "));
}

json read_config(const fs::path& folder) {
  const std::string path = (folder / "config.json").string();
  if (!fs::exists(path))
    fail("text", "{} holds no config.json: give the folder of a text encoder", folder.string());
  json config = read_json_file("text", path);
  if (!config.is_object()) fail("text", "{} is no JSON object", path);
  return config;
}

const TextFamily& family_of_config(const json& config, const fs::path& folder) {
  const auto type = JsonConfig("text", config).get<std::string>("model_type", "");
  std::vector<std::string> known;
  for (const TextFamily& family : text_families())
    for (const std::string& own : family.model_types) {
      if (type == own) return family;
      known.push_back(own);
    }
  fail("text", "{} is of model_type {:?}; known are {}", (folder / "config.json").string(), type,
       fmt::join(known, ", "));
}

fs::path weights_path_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"})
    if (fs::exists(folder / name)) return folder / name;
  fail("text",
       "{} holds no weights: expected model.safetensors, model.safetensors.index.json or pytorch_model.bin",
       folder.string());
}

// True for weights of matrix products. Tables and norms stay f32, as autocast leaves them. A table's key
// contains "embed" or "relative_attention_bias", or is "shared.weight".
bool is_of_a_product(const Parameter& parameter) {
  const std::string& key = parameter.key;
  return parameter.value.dim() == 2 && key.find("embed") == std::string::npos && key != "shared.weight" &&
         key.find("relative_attention_bias") == std::string::npos;
}

}  // namespace

bool is_text_encoder(const std::string& name) {
  for (const TextFamily& family : text_families())
    if (name == family.name) return true;
  return false;
}

std::vector<std::string> text_encoder_names() {
  std::vector<std::string> names;
  for (const TextFamily& family : text_families()) names.emplace_back(family.name);
  return names;
}

std::unique_ptr<TextEncoder> build_text_encoder(const std::string& name, const json& config,
                                                const BuildOptions& options) {
  return text_family_of(name).build(config, options);
}

Weights text_encoder_weights(const std::string& name, const Weights& weights) {
  return text_family_of(name).weights(weights);
}

const TransformersClasses& transformers_classes(const std::string& name) {
  return text_family_of(name).classes;
}

const std::vector<PublishedTextEncoder>& published_text_encoders() {
  static const std::vector<PublishedTextEncoder> all = {
      {"t5-v1_1-xxl-encoder",
       "t5_encoder",
       {{"d_model", 4096},
        {"d_kv", 64},
        {"d_ff", 10240},
        {"num_layers", 24},
        {"num_heads", 64},
        {"feed_forward_proj", "gated-gelu"}}},
      {"clip-vit-large-patch14-text",
       "clip_text",
       {{"hidden_size", 768}, {"intermediate_size", 3072}, {"num_attention_heads", 12}}},
      {"gemma-2-2b", "gemma2", json::object()},
  };
  return all;
}

int64_t weight_bytes(const TextEncoder& encoder) {
  int64_t bytes = 0;
  for (const auto& parameter : encoder.parameters())
    bytes += parameter->value.numel() * static_cast<int64_t>(parameter->value.element_size());
  return bytes;
}

void OpenedTextEncoder::load(at::Device device) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : encoder->parameters()) {
    const at::Tensor& as_stored = stored.at(parameter->key);
    parameter->value = as_stored.to(device, parameter->value.scalar_type());
    if (!parameter->value.is_alias_of(as_stored))
      MappedFile::release({static_cast<const std::byte*>(as_stored.const_data_ptr()), as_stored.nbytes()});
  }
  stored.clear();
}

namespace {

fs::path encoder_folder(const std::string& path) {
  if (!fs::is_directory(path)) fail("text", "{} is no folder: give the folder of a text encoder", path);
  const bool is_pipeline =
      fs::exists(fs::path(path) / "model_index.json") && fs::is_directory(fs::path(path) / "text_encoder");
  return is_pipeline ? fs::path(path) / "text_encoder" : fs::path(path);
}

std::unique_ptr<TextEncoder> outline(const TextFamily& family, const json& config,
                                     at::ScalarType compute_dtype) {
  return family.build(config, {.device = at::kMeta, .compute_dtype = compute_dtype, .outline = true});
}

void set_dtypes(const TextEncoder& encoder, at::ScalarType compute_dtype) {
  for (const auto& parameter : encoder.parameters())
    parameter->value = parameter->value.to(is_of_a_product(*parameter) ? compute_dtype : at::kFloat);
}

}  // namespace

OpenedTextEncoder open_text_encoder(const std::string& path, at::ScalarType compute_dtype,
                                    bool hashes_weights) {
  const at::NoGradGuard no_grad;
  const fs::path folder = encoder_folder(path);
  const json config = read_config(folder);
  const TextFamily& family = family_of_config(config, folder);
  OpenedTextEncoder opened{.encoder = outline(family, config, compute_dtype)};
  opened.weights_path = weights_path_in(folder).string();
  opened.stored = family.weights(load_tensors(opened.weights_path));
  const ParameterList parameters = opened.encoder->parameters();
  // Only compares names and shapes, because an outline takes no values.
  load_weights(parameters, opened.stored, opened.weights_path);
  if (hashes_weights) {
    const auto start = std::chrono::steady_clock::now();
    opened.fingerprint = weights_fingerprint(opened.stored);
    opened.read_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  set_dtypes(*opened.encoder, compute_dtype);
  return opened;
}

std::unique_ptr<TextEncoder> outline_text_encoder(const std::string& path, at::ScalarType compute_dtype) {
  const at::NoGradGuard no_grad;
  const fs::path folder = encoder_folder(path);
  const json config = read_config(folder);
  std::unique_ptr<TextEncoder> encoder = outline(family_of_config(config, folder), config, compute_dtype);
  set_dtypes(*encoder, compute_dtype);
  return encoder;
}

std::unique_ptr<TextEncoder> outline_text_encoder(const PublishedTextEncoder& published,
                                                  at::ScalarType compute_dtype) {
  const at::NoGradGuard no_grad;
  std::unique_ptr<TextEncoder> encoder =
      outline(text_family_of(published.family), published.config, compute_dtype);
  set_dtypes(*encoder, compute_dtype);
  return encoder;
}

}  // namespace kiln
