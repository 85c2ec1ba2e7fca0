#include "models/autoencoders/autoencoder.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/tensor_files.h"
#include "core/error.h"
#include "core/json_config.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/autoencoders/pixels.h"
#include "models/weights.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

json read_json(const fs::path& path) {
  std::ifstream file(path);
  if (!file) fail("autoencoder", "cannot read {}", path.string());
  try {
    return json::parse(file);
  } catch (const json::exception& error) {
    fail("autoencoder", "{} is not JSON: {}", path.string(), error.what());
  }
}

// The config of the weights at `path`; the SD VAE's when a file has none beside it.
json find_config(const fs::path& path) {
  const bool is_folder = fs::is_directory(path);
  const fs::path config = (is_folder ? path : path.parent_path()) / "config.json";
  if (fs::exists(config)) return read_json(config);
  if (is_folder)
    fail("autoencoder", "{} holds no config.json: give a diffusers folder or a weights file", path.string());
  fmt::print(stderr,
             "note: no config.json beside {}: taken for a Stable Diffusion VAE, scaling factor 0.18215\n",
             path.string());
  return sd_vae_config();
}

// XXH3 over key, shape and f32 values in key order: the same for both key generations, folders and single
// files.
std::string weights_fingerprint(const ParameterList& parameters) {
  std::map<std::string, at::Tensor> sorted;
  for (const auto& parameter : parameters) sorted.emplace(parameter->key, parameter->value);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const auto& [key, value] : sorted) {
    const at::Tensor values = value.to(at::kCPU, at::kFloat).contiguous();
    XXH3_64bits_update(state.get(), key.data(), key.size());
    XXH3_64bits_update(state.get(), values.sizes().data(), values.sizes().size() * sizeof(int64_t));
    XXH3_64bits_update(state.get(), values.const_data_ptr(), values.nbytes());
  }
  return fmt::format("xxh3:{:016x}", XXH3_64bits_digest(state.get()));
}

}  // namespace

std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype) {
  if (path == "pixels") return std::make_unique<Pixels>();
  if (!fs::exists(path))
    fail("autoencoder", "{} does not exist: give \"pixels\", a diffusers folder or a weights file", path);
  // A whole pipeline: its VAE is in a folder of its own.
  const bool is_pipeline =
      fs::exists(fs::path(path) / "model_index.json") && fs::is_directory(fs::path(path) / "vae");
  const fs::path weights_path = is_pipeline ? fs::path(path) / "vae" : fs::path(path);

  const json config = find_config(weights_path);
  const std::string class_name =
      JsonConfig("autoencoder", config).get<std::string>("_class_name", "AutoencoderKL");
  if (class_name != "AutoencoderKL")
    fail("autoencoder", "{} is of class {}; known are AutoencoderKL and \"pixels\"", weights_path.string(),
         class_name);
  auto autoencoder = std::make_unique<AutoencoderKl>(
      parse_autoencoder_kl_config(config), BuildOptions{.device = device, .compute_dtype = compute_dtype});
  load_weights(autoencoder->parameters(), current_autoencoder_kl_weights(load_tensors(weights_path.string())),
               weights_path.string());
  autoencoder->fingerprint = weights_fingerprint(autoencoder->parameters());
  autoencoder->freeze_weights();
  return autoencoder;
}

}  // namespace kiln
