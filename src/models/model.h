// What a model is to the rest of Kiln: a list of segments. The step (step/step.cpp) walks them forward, then
// backward; the sampler and text extraction walk them forward. A new denoiser is one file pair in denoisers/
// and one row of the registry.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "models/conditioning.h"
#include "models/parts/init.h"
#include "ops/ops.h"

namespace kiln {

struct Parameter;

// A low-rank change of a linear or convolution layer (LoRA, Hu et al. 2021): scale * up(down(x)) is added to
// the layer's output, to its channels from first_row on. models/lora.h attaches them.
struct Adapter {
  std::shared_ptr<Parameter> down;  // (r, in), or (r, in, k, k) with the layer's stride and padding
  std::shared_ptr<Parameter> up;    // (rows, r), or (rows, r, 1, 1)
  double scale = 1;
  int64_t first_row = 0;
  double dropout = 0;  // of the layer's input, while training (models/parts/adapter_dropout.h)
};

// A named weight. `value` is a leaf; during training it is a detached view into its segment's flat buffer, in
// the compute dtype (parallel/zero/flat_unit.h rebinds it).
struct Parameter {
  std::string key;  // published key
  at::Tensor value;
  Init init;  // distribution of a fresh weight
  bool trainable = true;
  bool adaptable = false;           // of a layer that adds what `adapters` give
  bool frozen = false;              // was trainable, and is the base that adapters change now
  std::vector<Adapter> adapters{};  // of the layer whose weight this is
};
using ParameterList = std::vector<std::shared_ptr<Parameter>>;

// Token ids of texts, one after another without padding.
struct TokenRows {
  at::Tensor ids{};                     // (T) i64
  std::vector<int64_t> host_offsets{};  // (B + 1): text b has ids [offsets[b], offsets[b + 1])
  at::Tensor counts{};                  // (T) bool: whether others may attend to it; undefined: to all
  at::Tensor types{};                   // (T) i64: first or second text of a pair (BERT); undefined: 0
};

// What the outside gives to one forward pass: a denoiser's x_t, timesteps and conditioning, or a text
// encoder's tokens.
struct ModelInput {
  at::Tensor x_t{};        // (B, C, H, W)
  at::Tensor timesteps{};  // (B) f32, as the model is given them (may be fractional)
  Conditioning conditioning{};
  TokenRows tokens{};
};

// What flows from segment to segment. Each tensor may be undefined; all are differentiable.
struct State {
  at::Tensor hidden{};  // tokens (B, N, D) or features (B, C, H, W); after the last segment the prediction
  at::Tensor conditioning{};        // of timestep (+ class), as the blocks take it (B, D)
  at::Tensor text{};                // projected captions (T, D), rows as in Conditioning::text
  at::Tensor bias{};                // of attention, shared by the blocks (T5)
  std::vector<at::Tensor> skips{};  // into a segment: what it pops; out of it: what it pushes (SkipUse)

  // Visits every defined differentiable tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (at::Tensor* tensor : {&hidden, &conditioning, &text, &bias})
      if (tensor->defined()) visitor(*tensor);
    for (at::Tensor& skip : skips)
      if (skip.defined()) visitor(skip);
  }
};

// How a segment uses the stack of skip connections, which the walk owns: it is given the newest `pops` of
// them, oldest first, and leaves `pushes` new ones.
struct SkipUse {
  int64_t pushes = 0, pops = 0;
};

// One unit of the walk, of recomputation, of gathering and of offload.
class Segment {
 public:
  virtual ~Segment() = default;
  // Pure in (state, input, parameters): recomputing gives the same bits.
  virtual State forward(const State& state, const ModelInput& input) const = 0;
  virtual SkipUse skips() const { return {}; }
  const std::string& name() const { return name_; }
  const ParameterList& parameters() const { return parameters_; }
  // Takes over the weights of an adapter of one of its layers.
  void adopt(std::shared_ptr<Parameter> parameter) { parameters_.push_back(std::move(parameter)); }

 protected:
  std::string name_;
  ParameterList parameters_;
};

// The skips between the segments of a walk.
class SkipStack {
 public:
  // Takes what `state` brings, and gives it what a segment of this use pops. Throws Error when there are not
  // as many.
  void enter(State& state, const SkipUse& use);
  // Takes what a segment left in `state`, of which there must be use.pushes.
  void leave(State& state, const SkipUse& use);

 private:
  std::vector<at::Tensor> stack_;
};

// What the trainer and sampler must know of a denoiser without knowing which it is.
struct DenoiserShape {
  int64_t in_channels = 0;    // C of x_t
  int64_t out_channels = 0;   // C, or 2C when sigma is learned (the first C are the prediction)
  int64_t input_size = 0;     // H = W the model was built for
  int64_t size_multiple = 0;  // sides may be any multiple of this; 0: input_size alone
  ConditioningShape conditioning{};
  int64_t guided_channels = 0;  // channels that guidance touches by the model's own convention
  double forward_flops = 0;     // multiply-adds times two of one image's forward pass
};

// Tensors are created on `device` in f32 and not initialised: initialize_weights() or load_weights() follows.
// `compute_dtype`: what matrix products and convolutions run in; norms, softmax and a transformer's residual
// stream stay f32. `outline`: weights have shapes only, without memory on any device, for who gives them
// their values one by one (step/training_state.h).
struct BuildOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  bool outline = false;
  ops::Products products = ops::Products::kComputeDtype;  // of large linear layers
};

class SegmentModel {
 public:
  virtual ~SegmentModel() = default;
  const std::vector<std::unique_ptr<Segment>>& segments() const { return segments_; }
  ParameterList parameters() const;  // of all segments, in order
  // What the last segment leaves in State::hidden, all segments in order.
  at::Tensor forward(const ModelInput& input) const;

 protected:
  std::vector<std::unique_ptr<Segment>> segments_;
};

// forward: (B, out_channels, H, W).
class Denoiser : public SegmentModel {
 public:
  const DenoiserShape& shape() const { return shape_; }
  // The learned rows that stand for a dropped caption, (max_text_tokens, D); null where there are none.
  const std::shared_ptr<Parameter>& null_text() const { return null_text_; }

 protected:
  DenoiserShape shape_;
  std::shared_ptr<Parameter> null_text_;
};

}  // namespace kiln
