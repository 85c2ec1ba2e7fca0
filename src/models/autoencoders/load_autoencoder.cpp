#include "models/autoencoders/autoencoder.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "core/text/json_text.h"
#include "models/autoencoders/autoencoder_dc.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/autoencoders/tiling.h"
#include "models/weights.h"
#include "ops/kernels.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr KnownAutoencoder kPixels = {"pixels", "", 1};

// Stands for no autoencoder: small pictures are their own latents.
class Pixels : public Autoencoder {
 public:
  Pixels() {
    name = kPixels.name;
    fingerprint = "none";
    latent_channels = 3;
    downsample = kPixels.downsample;
    has_posterior = false;
  }
  at::Tensor encode(const at::Tensor& images) const override { return images; }
  at::Tensor decode(const at::Tensor& raw_latents) const override { return raw_latents; }
  const ParameterList& parameters() const override { return parameters_; }

 private:
  ParameterList parameters_;  // none
};

// Returns the path of the weights. In a pipeline's folder that is the folder of the VAE.
fs::path weights_path_of(const std::string& path) {
  if (!fs::exists(path))
    fail("autoencoder", "{} does not exist: give \"pixels\", a diffusers folder or a weights file", path);
  const bool is_pipeline =
      fs::exists(fs::path(path) / "model_index.json") && fs::is_directory(fs::path(path) / "vae");
  return is_pipeline ? fs::path(path) / "vae" : fs::path(path);
}

fs::path config_path_of(const fs::path& weights) {
  return (fs::is_directory(weights) ? weights : weights.parent_path()) / "config.json";
}

// Reads the config. A weights file without a config beside it has the SD VAE's.
json config_of(const fs::path& weights) {
  const fs::path path = config_path_of(weights);
  if (!fs::exists(path) && fs::is_directory(weights))
    fail("autoencoder", "{} holds no config.json: give a diffusers folder or a weights file",
         weights.string());
  return fs::exists(path) ? read_json_file("autoencoder", path.string()) : sd_vae_config();
}

using WeightMap = std::map<std::string, at::Tensor>;

// A supported class of diffusers: builds it from a config, and brings a file's weights under the class's
// keys.
struct AutoencoderClass {
  KnownAutoencoder known;
  std::unique_ptr<Autoencoder> (*build)(const json& config, const BuildOptions& options);
  WeightMap (*weights)(const WeightMap& file);
  // Returns those of the published models that latents of unknown origin are taken to be of.
  const json& (*published)();
  const char* whose;
};
constexpr AutoencoderClass kClasses[] = {
    {{"autoencoder_kl", "AutoencoderKL", 8},
     [](const json& config, const BuildOptions& options) -> std::unique_ptr<Autoencoder> {
       return std::make_unique<AutoencoderKl>(parse_autoencoder_kl_config(config), options);
     },
     current_autoencoder_kl_weights,
     sd_vae_config,
     "KL-f8's"},
    {{"autoencoder_dc", "AutoencoderDC", 32},
     [](const json& config, const BuildOptions& options) -> std::unique_ptr<Autoencoder> {
       return std::make_unique<AutoencoderDc>(parse_autoencoder_dc_config(config), options);
     },
     autoencoder_dc_weights,
     sana_autoencoder_config,
     "Sana's DC-AE f32c32"},
};

const AutoencoderClass& class_of(const json& config, const fs::path& weights) {
  const std::string name = JsonConfig("autoencoder", config).get<std::string>("_class_name", "AutoencoderKL");
  for (const AutoencoderClass& each : kClasses)
    if (name == each.known.class_name) return each;
  fail("autoencoder", "{} is of class {}; known are AutoencoderKL, AutoencoderDC and \"pixels\"",
       weights.string(), name);
}

// It is the same for both key generations, for folders and for single files.
std::string fingerprint_of(const ParameterList& parameters) {
  WeightMap weights;
  for (const auto& parameter : parameters) weights.emplace(parameter->key, parameter->value);
  return weights_fingerprint(weights);
}

}  // namespace

json read_autoencoder_config(const std::string& path) { return config_of(weights_path_of(path)); }

std::vector<std::string> autoencoder_classes() {
  std::vector<std::string> names;
  for (const AutoencoderClass& each : kClasses) names.emplace_back(each.known.class_name);
  return names;
}

const KnownAutoencoder* known_autoencoder(const std::string& name) {
  for (const AutoencoderClass& each : kClasses)
    if (name == each.known.name) return &each.known;
  return name == kPixels.name ? &kPixels : nullptr;
}

PublishedAutoencoder published_autoencoder(int64_t downsample, int64_t channels) {
  const AutoencoderClass* found = kClasses;
  for (const AutoencoderClass& each : kClasses)
    if (downsample >= each.known.downsample) found = &each;
  json config = found->published();
  config["latent_channels"] = channels;
  return {.config = std::move(config), .whose = found->whose};
}

std::unique_ptr<Autoencoder> build_autoencoder(const json& config, const BuildOptions& options) {
  return class_of(config, "the autoencoder").build(config, options);
}

std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype) {
  return load_autoencoder(path, device, compute_dtype, Tiling());
}

std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype, const Tiling& tiling) {
  if (path == kPixels.name) return std::make_unique<Pixels>();
  const fs::path weights_path = weights_path_of(path);
  const json config = config_of(weights_path);
  const AutoencoderClass& known = class_of(config, weights_path);
  const at::ScalarType dtype = ops::product_dtype(device, compute_dtype);
  auto autoencoder = known.build(config, {.device = device, .compute_dtype = dtype});
  if (!fs::exists(config_path_of(weights_path)))
    fmt::print(
        stderr,
        "note: no config.json beside {}: assuming a Stable Diffusion VAE with scaling factor 0.18215\n",
        weights_path.string());
  const WeightMap weights = known.weights(load_tensors(weights_path.string()));
  if (std::ranges::none_of(weights, [](const auto& entry) { return entry.first.starts_with("encoder."); }))
    fail("autoencoder", "{} has no encoder: give the whole autoencoder, not its decoder alone",
         weights_path.string());
  load_weights(autoencoder->parameters(), weights, weights_path.string());
  autoencoder->fingerprint = fingerprint_of(autoencoder->parameters());
  autoencoder->freeze_weights();
  std::unique_ptr<Autoencoder> on_meta;
  if (tiling.when == Tiling::When::kNoRoom) {
    const DryRunScope dry_run(dry_run_of(device));
    on_meta = known.build(config, {.device = at::kMeta, .compute_dtype = dtype});
    on_meta->freeze_weights();
  }
  return with_tiling(std::move(autoencoder), std::move(on_meta), tiling, device);
}

}  // namespace kiln
