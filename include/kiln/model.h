// A denoiser and its weights as tensors of torch: link kiln::torch as well.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kiln/options.h"

namespace kiln {
class Denoiser;
}

namespace kiln::v0 {

class Model {
 public:
  // Loads a weights file, a diffusers folder, a run or a checkpoint. Weights are f32 on the device.
  static Model load(const std::string& path, at::Device device = at::kCPU);
  // Draws fresh weights. `name`: "DiT-S/2" or another of `kiln inspect --help`; `config`: JSON that overrides
  // what the name says.
  static Model fresh(const std::string& name, const std::string& config = "{}", uint64_t seed = 0,
                     at::Device device = at::kCPU);

  const std::string& name() const { return name_; }
  // Returns the prediction (B, C or 2C, H, W) for x_t (B, C, H, W), timesteps (B) in the model's own units
  // and class labels (B) i64. For models that take other conditions there is no call yet.
  at::Tensor predict(const at::Tensor& x_t, const at::Tensor& timesteps,
                     const at::Tensor& class_labels) const;
  // Published key -> tensor. Writing to one changes the model.
  std::map<std::string, at::Tensor> weights() const;

 private:
  Model(std::string name, std::shared_ptr<const Denoiser> denoiser)
      : name_(std::move(name)), denoiser_(std::move(denoiser)) {}

  std::string name_;
  std::shared_ptr<const Denoiser> denoiser_;
};

}  // namespace kiln::v0
