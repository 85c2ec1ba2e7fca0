// A network that turns pictures into the features that metrics compare.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace kiln {

struct PictureFeatures {
  at::Tensor features{};  // (B, D) f32: for Frechet and kernel distances, precision and recall
  at::Tensor spatial{};   // (B, S): for sFID; undefined where the net has none
  at::Tensor logits{};    // (B, K): for the Inception Score; undefined where the net has none
};

class FeatureNet {
 public:
  virtual ~FeatureNet() = default;
  // pictures (B, 3, H, W) u8 on any device.
  virtual PictureFeatures forward(const at::Tensor& pictures) const = 0;
  // Returns the weights, on the device where forward() computes.
  virtual std::vector<at::Tensor> weights() const = 0;

  std::string name, resize;
  std::string fingerprint;  // of the weights
};

}  // namespace kiln
