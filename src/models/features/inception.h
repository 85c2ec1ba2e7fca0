// The Inception network of FID, sFID, the Inception Score, KID and precision and recall (Szegedy et al. 2015
// as TensorFlow published it; Heusel et al. 2017): 1008 classes, average pools that leave out the padding, a
// maximum pool in the last block.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/model.h"

namespace kiln {

// How pictures become 299 x 299. kTorch: pytorch-fid's, bilinear with half-pixel centres on x / 255. kTf1:
// the TensorFlow graph's, source = destination * scale on 0..255, which ADM's evaluator and torch-fidelity
// use. The two give different features.
enum class InceptionResize { kTorch, kTf1 };
// "torch" | "tf1"; throws Error.
InceptionResize parse_inception_resize(const std::string& name);

struct InceptionFeatures {
  at::Tensor pool3;            // (B, 2048)
  at::Tensor logits;           // (B, 1008)
  at::Tensor logits_unbiased;  // (B, 1008), without the bias of fc: what the Inception Score takes
  at::Tensor spatial;          // (B, 2023): 7 channels of Mixed_6d.branch1x1, channels last
};

// Lists what the published file holds, on meta, with the counters of its batch norms, which nothing reads.
ParameterList published_inception_parameters();

class Inception {
 public:
  // Weights under torchvision's keys, TensorFlow's node names are renamed (inception_weights.h). Throws Error
  // naming `source`: missing or unknown keys, wrong shapes.
  Inception(const std::map<std::string, at::Tensor>& weights, const std::string& source, at::Device device);
  // Without weights, on meta: forward() computes shapes.
  Inception();
  ~Inception();

  std::vector<at::Tensor> weights() const;  // where forward() computes, batch norms folded into them
  // pictures (B, 3, H, W) u8 on any device. f32 throughout. Throws Error for anything else.
  InceptionFeatures forward(const at::Tensor& pictures, InceptionResize resize) const;

 private:
  friend ParameterList published_inception_parameters();
  struct Layers;
  struct Unfolded;
  void fold(const Unfolded& weights);

  std::unique_ptr<const Layers> layers_;
  at::Device device_;
};

}  // namespace kiln
