// AutoencoderDC, the deep-compression autoencoder of Sana (Chen et al. 2024, "Deep Compression Autoencoder"),
// with diffusers' names for its config and its weights. It encodes to latents, not to a distribution.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/autoencoders/autoencoder.h"
#include "models/model.h"

namespace kiln {

// The encoder or the decoder. Lists have an entry per level; a level works at 1 / 2^index of the picture's
// size.
struct DcHalfConfig {
  std::vector<bool> is_attention;  // true: EfficientViT blocks; false: residual ones
  std::vector<int64_t> widths, layers;
  std::vector<std::vector<int64_t>> multiscales;  // kernel sizes of an attention block's extra branches
  std::vector<bool> is_batch_norm;  // true: blocks have batch norm; false: RMS norm over channels
  std::vector<bool> is_relu;        // true: residual blocks have ReLU; false: SiLU
  bool shuffles = true;  // true: sizes change by pixel (un)shuffling; false: by a stride or interpolation
  bool shortcut = true;  // a parameter-free shortcut between the last level and the latents

  // Width of the first level that has layers. Level 0 may have none; then a resampling block replaces its
  // convolution.
  int64_t outer_width() const { return layers[0] > 0 ? widths[0] : widths[1]; }
};

// diffusers' config.json. The defaults are diffusers' own for keys that a file leaves out.
struct AutoencoderDcConfig {
  int64_t in_channels = 3, latent_channels = 32;
  int64_t head_dim = 32;
  DcHalfConfig encoder, decoder;
  bool final_relu = true;  // before the last convolution; false: SiLU
  double scaling_factor = 1;
};

// The config of Sana's autoencoder, dc-ae-f32c32-sana-1.0.
const nlohmann::json& sana_autoencoder_config();

// Throws Error naming the key for what is not implemented.
AutoencoderDcConfig parse_autoencoder_dc_config(const nlohmann::json& config);

class AutoencoderDc : public Autoencoder {
 public:
  // Weights are f32 and not initialised: load_weights(parameters(), ...) follows.
  AutoencoderDc(const AutoencoderDcConfig& config, const BuildOptions& options);
  ~AutoencoderDc() override;

  // Maps images (B, 3, H, W), whose sides are multiples of `downsample`, to raw latents (B, z, h, w).
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

// Returns a file's tensors without those that the model does not read (batch counters of batch norms).
std::map<std::string, at::Tensor> autoencoder_dc_weights(const std::map<std::string, at::Tensor>& weights);

}  // namespace kiln
