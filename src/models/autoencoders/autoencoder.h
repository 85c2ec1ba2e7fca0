// Image autoencoders, as the feature extractor and the sampler see them.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "models/model.h"

namespace kiln {

class Autoencoder {
 public:
  virtual ~Autoencoder() = default;
  // images (B, 3, H, W) in [-1, 1] -> moments (B, 2z, h, w): mean, then unclamped logvar. Without a posterior
  // the raw latents (B, z, h, w), from which nothing is drawn.
  virtual at::Tensor encode(const at::Tensor& images) const = 0;
  // raw latents (B, z, h, w), not scaled -> images (B, 3, H, W), not clamped.
  virtual at::Tensor decode(const at::Tensor& raw_latents) const = 0;
  virtual const ParameterList& parameters() const = 0;
  // Converts the weights to the compute dtype and to the layout that convolutions take, once: for inference.
  virtual void freeze_weights() {}

  std::string name;                             // "autoencoder_kl" | "autoencoder_dc" | "pixels"
  std::string fingerprint;                      // "xxh3:..." of the weights; "none" for pixels
  bool has_posterior = true;                    // encode gives a distribution
  int64_t latent_channels = 4;                  // z
  int64_t downsample = 8;                       // H / h
  double scaling_factor = 1, shift_factor = 0;  // latents = (raw - shift) * scaling
  double tile_overlap = 0.25;                   // of the tiles that large pictures are cut into (tiling.h)
};

// Reads the config.json of what load_autoencoder(path) would load; takes the same paths but "pixels". Throws
// Error.
nlohmann::json read_autoencoder_config(const std::string& path);
// Builds the class that a config names, AutoencoderKL where it names none, without weights. Throws Error.
std::unique_ptr<Autoencoder> build_autoencoder(const nlohmann::json& config, const BuildOptions& options);

// "pixels", a diffusers folder (config.json + weights), or a weights file with a config.json beside it
// (without one: the SD VAE's config is assumed and said so). Throws Error.
std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype);

}  // namespace kiln
