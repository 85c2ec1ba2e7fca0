// AutoencoderKL, the VAE of Stable Diffusion (Rombach et al. 2022), as diffusers names its config and its
// weights.
#pragma once
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "models/model.h"

namespace kiln {

// diffusers' config.json; the values here are the SD VAE's.
struct AutoencoderKlConfig {
  int64_t in_channels = 3, out_channels = 3;
  std::vector<int64_t> block_out_channels = {128, 256, 512, 512};
  int64_t layers_per_block = 2;
  int64_t latent_channels = 4;
  int64_t norm_num_groups = 32;
  double scaling_factor = 0.18215, shift_factor = 0;
  bool use_quant_conv = true, use_post_quant_conv = true;
  bool mid_block_add_attention = true;
};

// Keys that are absent have diffusers' defaults. Throws Error naming the key for what this implementation
// does not build.
AutoencoderKlConfig parse_autoencoder_kl_config(const nlohmann::json& config);

// The config of Stable Diffusion's VAE, where it is not the default.
const nlohmann::json& sd_vae_config();

// Key of a weight as diffusers names it today: files of the first generation say query, key, value,
// proj_attn.
std::string current_autoencoder_kl_key(const std::string& key);
// The other way round.
std::string first_autoencoder_kl_key(const std::string& key);
// The same for a whole file; attention weights stored as 1x1 convolutions (C, C, 1, 1) become (C, C).
std::map<std::string, at::Tensor> current_autoencoder_kl_weights(
    const std::map<std::string, at::Tensor>& weights);

class AutoencoderKl : public Autoencoder {
 public:
  // Weights are f32 and not initialised: load_weights(parameters(), ...) follows.
  AutoencoderKl(const AutoencoderKlConfig& config, const BuildOptions& options);
  ~AutoencoderKl() override;

  // Sides that `downsample` does not divide are rounded down, as the convolutions do it.
  at::Tensor encode(const at::Tensor& images) const override;
  at::Tensor decode(const at::Tensor& raw_latents) const override;
  const ParameterList& parameters() const override { return parameters_; }
  void freeze_weights() override;

 private:
  struct Encoder;
  struct Decoder;
  ParameterList parameters_;
  int64_t in_channels_;
  at::ScalarType compute_dtype_;
  std::unique_ptr<const Encoder> encoder_;
  std::unique_ptr<const Decoder> decoder_;
};

}  // namespace kiln
