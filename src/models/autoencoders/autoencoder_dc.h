// AutoencoderDC, the deep-compression autoencoder of Sana (Chen et al. 2024, "Deep Compression Autoencoder"),
// as diffusers names its config and its weights. Its latents are no distribution.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "models/model.h"

namespace kiln {

// One half: the level of each entry works at 1 / 2^index of the picture's size.
struct DcHalfConfig {
  std::vector<bool> is_attention;  // EfficientViT blocks, not residual ones
  std::vector<int64_t> widths, layers;
  std::vector<std::vector<int64_t>> multiscales;  // kernel sizes of an attention block's further branches
  std::vector<bool> is_batch_norm;                // of the blocks, not RMS norm over the channels
  std::vector<bool> is_relu;                      // of the residual blocks, not SiLU
  bool shuffles = true;  // sizes change by pixel (un)shuffling, not by a stride or by interpolation
  bool shortcut = true;  // parameter-free, between the widest level and the latents

  // Widths of the levels that have layers; the first may have none, and then a resampling block stands for
  // its convolution.
  int64_t outer_width() const { return layers[0] > 0 ? widths[0] : widths[1]; }
};

// diffusers' config.json; the values are diffusers' own for keys that a file leaves out.
struct AutoencoderDcConfig {
  int64_t in_channels = 3, latent_channels = 32;
  int64_t head_dim = 32;
  DcHalfConfig encoder, decoder;
  bool final_relu = true;  // before the last convolution, not SiLU
  double scaling_factor = 1;
};

// The config of Sana's, dc-ae-f32c32-sana-1.0.
const nlohmann::json& sana_autoencoder_config();

// Throws Error naming the key for what this implementation does not build.
AutoencoderDcConfig parse_autoencoder_dc_config(const nlohmann::json& config);

class AutoencoderDc : public Autoencoder {
 public:
  // Weights are f32 and not initialised: load_weights(parameters(), ...) follows.
  AutoencoderDc(const AutoencoderDcConfig& config, const BuildOptions& options);
  ~AutoencoderDc() override;

  // images (B, 3, H, W), sides multiples of `downsample` -> raw latents (B, z, h, w).
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

// A file's tensors without what the model does not read (batch norms' counts of batches).
std::map<std::string, at::Tensor> autoencoder_dc_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
