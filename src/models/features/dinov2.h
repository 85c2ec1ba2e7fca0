// DINOv2's vision transformers (Oquab et al. 2023), with registers (Darcet et al. 2023) or without. They give
// the features of FD-DINOv2 and KD-DINOv2.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "core/json.h"
#include "models/model.h"

namespace kiln {

struct Dinov2Config {
  int64_t hidden_size = 768, depth = 12, num_heads = 12;
  double mlp_ratio = 4;
  int64_t image_size = 518, patch_size = 14;  // of the stored positions
  bool qkv_bias = true, swiglu = false;
  int64_t num_registers = 0;
  bool has_registers = false;  // of the variant with registers, which interpolates positions with antialias
  double norm_eps = 1e-6;
};
// Reads transformers' config.json of a Dinov2Model or Dinov2WithRegistersModel. Throws Error.
Dinov2Config parse_dinov2_config(const nlohmann::json& config);
// Finds the config from weights alone, under dinov2_weights()'s keys. Assumes heads of width 64, as in all
// published models. Throws Error for other keys.
Dinov2Config dinov2_config_of(const std::map<std::string, at::Tensor>& weights, const std::string& source);

// Returns weights under the published keys, those of transformers 4. Renames keys of transformers 5 and of
// the original repository's .pth.
std::map<std::string, at::Tensor> dinov2_weights(const std::map<std::string, at::Tensor>& weights);

struct Dinov2Features {
  at::Tensor
      last_hidden_state;     // (B, 1 + R + N, D) f32: class token, registers, patches; after the final norm
  at::Tensor pooler_output;  // (B, D): the class token of last_hidden_state
};

class Dinov2 {
 public:
  // Does not initialise weights: load_weights() with dinov2_weights() follows.
  explicit Dinov2(const Dinov2Config& config, const BuildOptions& options = {});
  ~Dinov2();

  const ParameterList& parameters() const { return parameters_; }
  int64_t width() const { return config_.hidden_size; }
  // images (B, 3, H, W) f32, normalised. Ignores what a side has beyond a multiple of the patch. Throws Error
  // for sides below one patch.
  Dinov2Features forward(const at::Tensor& images) const;

 private:
  struct Layers;
  // Returns positions (1, 1 + N, D) of a grid of patches. `is_square`: the image is square, whatever its
  // grid.
  at::Tensor positions(int64_t grid_h, int64_t grid_w, bool is_square) const;

  Dinov2Config config_;
  at::ScalarType compute_dtype_;
  ParameterList parameters_;
  std::unique_ptr<const Layers> layers_;
};

// Resizes and normalises 8-bit pictures (B, 3, H, W) to (B, 3, 224, 224). "pillow" is bicubic with antialias,
// as in the papers that introduced FD-DINOv2; "tf1" is TensorFlow 1's bilinear, as in torch-fidelity. Throws
// Error.
at::Tensor dinov2_input(const at::Tensor& pictures, const std::string& resize);

}  // namespace kiln
