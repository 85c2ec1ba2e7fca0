// Networks that turn pictures into the features that metrics compare, and their table by name.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
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

// A convolutional network with fixed random weights that are the same everywhere. Its distances show progress
// on one data set without a download of weights. They do not compare with a paper's.
// Makes the net: three stages of 3x3 convolutions of stride 2 with ReLU. The features are mean and deviation
// of each channel of each stage, so that pictures of any size fit.
std::unique_ptr<FeatureNet> make_random_net(const std::string& weights, const std::string& resize,
                                            at::Device device);

struct FeatureNetKind {
  const char* name;
  std::vector<std::string> resizes;  // the first one is the default
  bool takes_weights;
  bool has_logits, has_spatial;
  bool statistics_are_published;  // statistics in an .npz with pictures are from this net
  std::unique_ptr<FeatureNet> (*load)(const std::string& weights, const std::string& resize,
                                      at::Device device);
  // Makes the net on meta, without weights, for plans. Takes the architecture from the file `weights` if that
  // exists.
  std::unique_ptr<FeatureNet> (*outline)(const std::string& weights, const std::string& resize);
};
const std::vector<FeatureNetKind>& feature_net_kinds();
// Returns the kind of that name. Throws Error listing the known names.
const FeatureNetKind& feature_net_kind(const std::string& name);

// Loads a net. `weights`: "" for a net that needs none. `resize`: "" for its default. Throws Error.
std::unique_ptr<FeatureNet> load_feature_net(const std::string& name, const std::string& weights,
                                             const std::string& resize, at::Device device);
// Makes a net on meta, which computes shapes only. If the file `weights` does not exist, assumes the
// published Inception, or DINOv2's ViT-B/14. Throws Error.
std::unique_ptr<FeatureNet> outline_feature_net(const std::string& name, const std::string& weights);

}  // namespace kiln
