// What a denoiser is to the rest of Kiln: a list of segments. The step (train/step.cpp) walks them forward,
// then backward; the sampler walks them forward. A new model is one file pair in denoisers/ and one registry
// line.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "models/init.h"

namespace kiln {

// A named weight. `value` is a leaf; during training it is a detached view into its segment's flat buffer, in
// the compute dtype (parallel/flat_unit.h rebinds it).
struct Parameter {
  std::string key;  // published key
  at::Tensor value;
  Init init;  // distribution of a fresh weight
  bool trainable = true;
};
using ParameterList = std::vector<std::shared_ptr<Parameter>>;

// What the outside gives to one forward pass.
struct DenoiserInput {
  at::Tensor x_t{};           // (B, C, H, W)
  at::Tensor timesteps{};     // (B) f32, as the model is given them (may be fractional)
  at::Tensor class_labels{};  // (B) i64; the null class = num_classes
  at::Tensor text_embeds{};   // (B, L, D)
  at::Tensor text_mask{};     // (B, L), 1 = token
};

// What flows from segment to segment. Each tensor may be undefined; all are differentiable.
struct State {
  at::Tensor hidden{};  // tokens (B, N, D) or features (B, C, H, W); after the last segment the prediction
  at::Tensor conditioning{};        // of timestep (+ class), as the blocks take it (B, D)
  at::Tensor text{};                // projected caption (B, L, D)
  std::vector<at::Tensor> skips{};  // U-Net skip connections

  // Visits every defined differentiable tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (at::Tensor* tensor : {&hidden, &conditioning, &text})
      if (tensor->defined()) visitor(*tensor);
    for (at::Tensor& skip : skips)
      if (skip.defined()) visitor(skip);
  }
};

// One unit of the walk, of recomputation, of gathering and of offload.
class Segment {
 public:
  virtual ~Segment() = default;
  // Pure in (state, input, parameters): recomputing gives the same bits.
  virtual State forward(const State& state, const DenoiserInput& input) const = 0;
  const std::string& name() const { return name_; }
  const ParameterList& parameters() const { return parameters_; }

 protected:
  std::string name_;
  ParameterList parameters_;
};

// What the trainer and sampler must know of a model without knowing which it is.
struct DenoiserShape {
  int64_t in_channels = 0;      // C of x_t
  int64_t out_channels = 0;     // C, or 2C when sigma is learned (the first C are the prediction)
  int64_t input_size = 0;       // H = W the model was built for
  int64_t num_classes = 0;      // 0 without a null class: the model takes no labels
  bool has_null_class = false;  // label num_classes exists (class dropout)
  int64_t guided_channels = 0;  // channels that guidance touches by the model's own convention
  double forward_flops = 0;     // multiply-adds times two of one image's forward pass
};

// Tensors are created on `device` in f32 and not initialised: initialize_weights() or load_weights() follows.
// `compute_dtype`: what matrix products and convolutions run in; norms, softmax and a transformer's residual
// stream stay f32. `outline`: weights have shapes only, without memory on any device, for who gives them
// their values one by one (train/training_state.h).
struct BuildOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  bool outline = false;
};

class Denoiser {
 public:
  virtual ~Denoiser() = default;
  const std::vector<std::unique_ptr<Segment>>& segments() const { return segments_; }
  const DenoiserShape& shape() const { return shape_; }
  ParameterList parameters() const;  // of all segments, in order
  // All segments in order; (B, out_channels, H, W).
  at::Tensor forward(const DenoiserInput& input) const;

 protected:
  std::vector<std::unique_ptr<Segment>> segments_;
  DenoiserShape shape_;
};

}  // namespace kiln
