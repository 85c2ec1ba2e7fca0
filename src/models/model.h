// A model, which the rest of Kiln sees as a list of segments. The step (step/step.cpp) walks them forward,
// then backward; the sampler and text extraction walk them forward. A new denoiser is one folder in
// denoisers/ and one row of families.h there.
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
  double dropout = 0;  // of the layer's input in training (models/parts/adapter_dropout.h)
};

// A named weight. `value` is a leaf; during training it is a detached view into its segment's flat buffer, in
// the compute dtype (parallel/zero/flat_unit.h rebinds it).
struct Parameter {
  std::string key;  // published key
  at::Tensor value;
  Init init;  // distribution of a fresh weight
  bool trainable = true;
  bool adaptable = false;           // its layer adds the outputs of `adapters`
  bool frozen = false;              // was trainable; now it is the base of adapters
  std::vector<Adapter> adapters{};  // on the layer of this weight
};
using ParameterList = std::vector<std::shared_ptr<Parameter>>;

// Token ids of several texts, one after another without padding.
struct TokenRows {
  at::Tensor ids{};                     // (T) i64
  std::vector<int64_t> host_offsets{};  // (B + 1): text b has ids [offsets[b], offsets[b + 1])
  at::Tensor counts{};  // (T) bool: true if others may attend to the token; undefined: all true
  at::Tensor types{};   // (T) i64: 0 in the first, 1 in the second text of a pair (BERT); undefined: 0
};

// The input of one forward pass: x_t, timesteps and conditioning of a denoiser, or tokens of a text encoder.
struct ModelInput {
  at::Tensor x_t{};        // (B, C, H, W)
  at::Tensor timesteps{};  // (B) f32 in the model's own units; may be fractional
  Conditioning conditioning{};
  TokenRows tokens{};
};

// The tensors that flow from segment to segment. Each may be undefined; all are differentiable.
struct State {
  at::Tensor hidden{};  // tokens (B, N, D) or features (B, C, H, W); after the last segment the prediction
  at::Tensor conditioning{};  // (B, D) from timestep and class, as the blocks take it
  at::Tensor text{};          // (T, D) projected captions, with the rows of Conditioning::text
  at::Tensor bias{};          // attention bias that the blocks share (T5)
  // A branch (B, N, D) and its gate (B, D) that the next segment adds to hidden, where a step fuses the two
  // (ops::OpChoices); else undefined.
  at::Tensor branch{}, gate{};
  std::vector<at::Tensor> skips{};  // before a segment those it pops, after it those it pushes

  // Visits every defined differentiable tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (at::Tensor* tensor : {&hidden, &conditioning, &text, &bias, &branch, &gate})
      if (tensor->defined()) visitor(*tensor);
    for (at::Tensor& skip : skips)
      if (skip.defined()) visitor(skip);
  }
};

// How a segment uses the stack of skip connections, which the walk owns. The segment gets the newest `pops`
// skips, oldest first, and leaves `pushes` new ones.
struct SkipUse {
  int64_t pushes = 0, pops = 0;
};

// A part of a model. The walk, recomputation, gathering and offload work segment by segment.
class Segment {
 public:
  virtual ~Segment() = default;
  // The result depends on (state, input, parameters) alone, so that recomputing gives the same bits.
  virtual State forward(const State& state, const ModelInput& input) const = 0;
  virtual SkipUse skips() const { return {}; }
  const std::string& name() const { return name_; }
  const ParameterList& parameters() const { return parameters_; }
  // Adds a weight of an adapter to the segment's parameters.
  void adopt(std::shared_ptr<Parameter> parameter) { parameters_.push_back(std::move(parameter)); }

 protected:
  std::string name_;
  ParameterList parameters_;
};

// The skips between the segments of a walk.
class SkipStack {
 public:
  // Moves the skips that the next segment pops from the stack into `state`. Throws Error when the stack holds
  // fewer.
  void enter(State& state, const SkipUse& use);
  // Moves the skips that the segment left in `state` onto the stack. Throws Error unless they are use.pushes.
  void leave(State& state, const SkipUse& use);

 private:
  std::vector<at::Tensor> stack_;
};

// What one image's arithmetic depends on besides the model.
struct ImageExtent {
  int64_t height = 0, width = 0;  // of x_t
  double text_rows = 0;           // of its caption, or the mean of several captions
};

// What the segments of a transformer put out, from the first to the last but one: State::hidden is a token
// (B, N, width) for each patch of x_t, row by row.
struct TokenShape {
  int64_t width = 0, patch_size = 0;  // width 0: the segments put out something else
};

// The facts of a denoiser that the trainer and the sampler need, whichever model it is.
struct DenoiserShape {
  int64_t in_channels = 0;    // C of x_t
  int64_t out_channels = 0;   // C, or 2C when sigma is learned (the first C are the prediction)
  int64_t input_size = 0;     // the height and width that the model was built for
  int64_t size_multiple = 0;  // sides may be any multiple of this; 0: only input_size fits
  ConditioningShape conditioning{};
  int64_t guided_channels = 0;  // guidance changes so many first channels by the published model's convention
  TokenShape tokens{};

  bool predicts_sigma() const { return out_channels > in_channels; }
  // Returns the extent of an image of the model's own size with the longest caption.
  ImageExtent native_extent() const {
    return {input_size, input_size, static_cast<double>(conditioning.max_text_tokens)};
  }
};

// How a model is built. Weights are created on `device` in f32 and not initialised: initialize_weights() or
// load_weights() follows. Matrix products and convolutions run in `compute_dtype`; norms, softmax and a
// transformer's residual stream stay f32. With `outline` weights have shapes but no memory on any device, for
// callers that give them their values one by one (step/training_state.h).
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
  // Runs all segments in order and returns State::hidden of the last.
  at::Tensor forward(const ModelInput& input) const;

 protected:
  std::vector<std::unique_ptr<Segment>> segments_;
};

// A model whose forward() returns (B, out_channels, H, W).
class Denoiser : public SegmentModel {
 public:
  const DenoiserShape& shape() const { return shape_; }
  // Learned rows that replace a dropped caption, (max_text_tokens, D). Null if the model has none.
  const std::shared_ptr<Parameter>& null_text() const { return null_text_; }

 protected:
  DenoiserShape shape_;
  std::shared_ptr<Parameter> null_text_;
};

}  // namespace kiln
