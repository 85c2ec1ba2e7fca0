#include "models/text/text_registry.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/text/nearest_name.h"
#include "models/text/bert.h"
#include "models/text/clip_text.h"
#include "models/text/gemma2.h"
#include "models/text/t5.h"
#include "models/weights.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Weights = std::map<std::string, at::Tensor>;

struct Family {
  const char* name;
  std::vector<std::string> model_types;  // of transformers' config.json
  std::unique_ptr<TextEncoder> (*build)(const json& config, const BuildOptions& options);
  Weights (*weights)(const Weights& published);
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"t5_encoder", {"t5"}, build_t5_encoder, t5_encoder_weights},
      {"bert", {"bert"}, build_bert, bert_weights},
      {"clip_text", {"clip_text_model", "clip"}, build_clip_text, clip_text_weights},
      {"gemma2", {"gemma2"}, build_gemma2, gemma2_weights},
  };
  return all;
}

const Family& family_of(const std::string& name) {
  for (const Family& family : families())
    if (name == family.name) return family;
  const std::vector<std::string> known = text_encoder_names();
  fail("text", "unknown text encoder {:?}: did you mean {:?}? (known are {})", name,
       nearest_name(name, known), fmt::join(known, ", "));
}

json read_config(const fs::path& folder) {
  std::ifstream file(folder / "config.json", std::ios::binary);
  if (!file) fail("text", "{} holds no config.json: give the folder of a text encoder", folder.string());
  json config = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) fail("text", "{} is no JSON object", (folder / "config.json").string());
  return config;
}

const Family& family_of_config(const json& config, const fs::path& folder) {
  const auto type = JsonConfig("text", config).get<std::string>("model_type", "");
  std::vector<std::string> known;
  for (const Family& family : families())
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

// XXH3 over key, shape and f32 values in key order.
std::string weights_fingerprint(const Weights& weights) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const auto& [key, value] : weights) {
    const at::Tensor values = value.to(at::kCPU, at::kFloat).contiguous();
    XXH3_64bits_update(state.get(), key.data(), key.size());
    XXH3_64bits_update(state.get(), values.sizes().data(), values.sizes().size() * sizeof(int64_t));
    XXH3_64bits_update(state.get(), values.const_data_ptr(), values.nbytes());
  }
  return fmt::format("xxh3:{:016x}", XXH3_64bits_digest(state.get()));
}

// Tables and norms stay f32: autocast does not touch them. Tables end in embedding(s) or are called shared.
bool is_of_a_product(const Parameter& parameter) {
  const std::string& key = parameter.key;
  return parameter.value.dim() == 2 && key.find("embed") == std::string::npos && key != "shared.weight" &&
         key.find("relative_attention_bias") == std::string::npos;
}

}  // namespace

bool is_text_encoder(const std::string& name) {
  for (const Family& family : families())
    if (name == family.name) return true;
  return false;
}

std::vector<std::string> text_encoder_names() {
  std::vector<std::string> names;
  for (const Family& family : families()) names.emplace_back(family.name);
  return names;
}

std::unique_ptr<TextEncoder> build_text_encoder(const std::string& name, const json& config,
                                                const BuildOptions& options) {
  return family_of(name).build(config, options);
}

Weights text_encoder_weights(const std::string& name, const Weights& weights) {
  return family_of(name).weights(weights);
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

LoadedTextEncoder load_text_encoder(const std::string& path, at::Device device,
                                    at::ScalarType compute_dtype) {
  const at::NoGradGuard no_grad;
  if (!fs::is_directory(path)) fail("text", "{} is no folder: give the folder of a text encoder", path);
  const bool is_pipeline =
      fs::exists(fs::path(path) / "model_index.json") && fs::is_directory(fs::path(path) / "text_encoder");
  const fs::path folder = is_pipeline ? fs::path(path) / "text_encoder" : fs::path(path);
  const json config = read_config(folder);
  const Family& family = family_of_config(config, folder);
  LoadedTextEncoder loaded{
      .encoder =
          family.build(config, {.device = at::kMeta, .compute_dtype = compute_dtype, .outline = true})};
  const fs::path weights_path = weights_path_in(folder);
  const Weights weights = family.weights(load_tensors(weights_path.string()));
  const ParameterList parameters = loaded.encoder->parameters();
  load_weights(parameters, weights,
               weights_path.string());  // compares names and shapes: an outline takes no values
  loaded.fingerprint = weights_fingerprint(weights);
  for (const auto& parameter : parameters)
    parameter->value =
        weights.at(parameter->key).to(device, is_of_a_product(*parameter) ? compute_dtype : at::kFloat);
  return loaded;
}

}  // namespace kiln
