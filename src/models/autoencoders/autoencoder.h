// Image autoencoders: the interface that the feature extractor and the sampler use.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/model.h"

namespace kiln {

class Autoencoder {
 public:
  virtual ~Autoencoder() = default;
  // Maps images (B, 3, H, W) in [-1, 1] to moments (B, 2z, h, w): mean, then unclamped logvar. An autoencoder
  // without a posterior returns raw latents (B, z, h, w), and nothing is drawn.
  virtual at::Tensor encode(const at::Tensor& images) const = 0;
  // Maps raw latents (B, z, h, w), not scaled, to images (B, 3, H, W), not clamped.
  virtual at::Tensor decode(const at::Tensor& raw_latents) const = 0;
  virtual const ParameterList& parameters() const = 0;
  // Converts the weights once to the compute dtype and to the layout that convolutions take. For inference
  // only.
  virtual void freeze_weights() {}

  std::string name;                             // "autoencoder_kl" | "autoencoder_dc" | "pixels"
  std::string fingerprint;                      // "xxh3:..." of the weights; "none" for pixels
  bool has_posterior = true;                    // encode() returns a distribution
  int64_t latent_channels = 4;                  // z
  int64_t downsample = 8;                       // H / h
  double scaling_factor = 1, shift_factor = 0;  // latents = (raw - shift) * scaling
  double tile_overlap = 0.25;                   // overlap of tiles as a share of their side (tiling.h)
};

// Reads the config.json that load_autoencoder(path) would read. Takes the same paths except "pixels". Throws
// Error.
nlohmann::json read_autoencoder_config(const std::string& path);
// Returns the classes that a config may name.
std::vector<std::string> autoencoder_classes();
// What Autoencoder::name stands for.
struct KnownAutoencoder {
  const char *name, *class_name;  // the class of diffusers; "" for pixels
  int64_t downsample;             // of the published models
};
// Returns null for an unknown name.
const KnownAutoencoder* known_autoencoder(const std::string& name);
struct PublishedAutoencoder {
  nlohmann::json config;
  std::string whose;  // "Sana's DC-AE f32c32"
};
// Returns the published autoencoder that may have made latents of so many pixels a side and channels.
PublishedAutoencoder published_autoencoder(int64_t downsample, int64_t channels);
// Builds the class that a config names, or AutoencoderKL if it names none. Does not load weights. Throws
// Error.
std::unique_ptr<Autoencoder> build_autoencoder(const nlohmann::json& config, const BuildOptions& options);

// Loads an autoencoder. `path` is "pixels", a diffusers folder (config.json and weights), or a weights file
// with a config.json beside it. If that is missing, the SD VAE's config is assumed and a note printed. Throws
// Error.
std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype);

}  // namespace kiln
