// AutoencoderKL, the VAE of Stable Diffusion (Rombach et al. 2022), with diffusers' names for its config and
// its weights.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/autoencoders/autoencoder.h"
#include "models/model.h"

namespace kiln {

// diffusers' config.json. The defaults here are the SD VAE's.
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

// Reads a config. Absent keys have diffusers' defaults. Throws Error naming the key for what is not
// implemented.
AutoencoderKlConfig parse_autoencoder_kl_config(const nlohmann::json& config);

// The keys of the config of Stable Diffusion's VAE that differ from diffusers' defaults.
const nlohmann::json& sd_vae_config();

// Returns diffusers' present key of a weight. Files of the first generation say query, key, value, proj_attn.
std::string current_autoencoder_kl_key(const std::string& key);
// The inverse: returns the key of the first generation.
std::string first_autoencoder_kl_key(const std::string& key);
// Renames a whole file to the present keys. Attention weights stored as 1x1 convolutions (C, C, 1, 1) become
// (C, C).
std::map<std::string, at::Tensor> current_autoencoder_kl_weights(
    const std::map<std::string, at::Tensor>& weights);

class AutoencoderKl : public Autoencoder {
 public:
  // Weights are f32 and not initialised: load_weights(parameters(), ...) follows.
  AutoencoderKl(const AutoencoderKlConfig& config, const BuildOptions& options);
  ~AutoencoderKl() override;

  // Rounds sides that `downsample` does not divide down, as the convolutions do.
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
