// The Inception network of FID, sFID, the Inception Score, KID and precision and recall (Szegedy et al. 2015
// as TensorFlow published it; Heusel et al. 2017). It has 1008 classes, average pools that leave out the
// padding, and a maximum pool in the last block.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/model.h"

namespace kiln {

// How pictures are resized to 299 x 299. kTorch is pytorch-fid's way: bilinear with half-pixel centres on x /
// 255. kTf1 is the TensorFlow graph's way, which ADM's evaluator and torch-fidelity use: source = destination
// * scale on 0..255. The two give different features.
enum class InceptionResize { kTorch, kTf1 };
// "torch" | "tf1"; throws Error.
InceptionResize parse_inception_resize(const std::string& name);

struct InceptionFeatures {
  at::Tensor pool3;            // (B, 2048)
  at::Tensor logits;           // (B, 1008)
  at::Tensor logits_unbiased;  // (B, 1008), without the bias of fc, for the Inception Score
  at::Tensor spatial;          // (B, 2023): 7 channels of Mixed_6d.branch1x1, channels last
};

// Returns weights under torchvision's keys and in its layouts. Files that have these (pytorch-fid's and
// torch-fidelity's .pth) pass as they are, without counters and the auxiliary classifier, which no metric
// uses. Constants of TensorFlow's graph ("mixed/conv/conv2d_params" HWIO, ".../batchnorm/gamma",
// "softmax/weights") are renamed and transposed; a gamma that is missing there is 1.
std::map<std::string, at::Tensor> torchvision_inception_weights(
    const std::map<std::string, at::Tensor>& weights);

// Lists the tensors of the published file, on meta. Includes the counters of batch norms, which nothing
// reads.
ParameterList published_inception_parameters();

class Inception {
 public:
  // Takes weights under the keys that torchvision_inception_weights() reads. Throws Error naming `source` for
  // missing or unknown keys and for wrong shapes.
  Inception(const std::map<std::string, at::Tensor>& weights, const std::string& source, at::Device device);
  // Makes the net on meta, without weights. forward() then computes shapes.
  Inception();
  ~Inception();

  std::vector<at::Tensor> weights() const;  // on the device of forward(), with batch norms folded in
  // Takes pictures (B, 3, H, W) u8 on any device. Computes in f32. Throws Error for anything else.
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
