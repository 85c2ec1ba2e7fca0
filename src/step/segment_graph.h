// The autograd graph of one segment, cut off from all others: how its forward is recorded and how its
// backward runs.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <utility>
#include <vector>

#include "models/model.h"

namespace kiln {

// Returns the same tensors, cut from the graph they come from. They collect a gradient if `with_grad`.
State detached(State state, bool with_grad);
// As above, but a tensor collects a gradient if it required one before, that is, if trained weights shaped
// it.
State detached(State state);
bool any_requires_grad(State& state);
// For use after a forward without a graph, whose outputs require no gradient. Marks those outputs that a
// backward has to ask for a gradient, as after a forward with a graph. `input` and `output` belong to the
// segment; `trains` is true if it has trained weights. Tensors that the segment only hands on are left as
// they are.
void mark_trained(const State& input, State& output, bool trains);

// Carries gradients of skip connections from the segment that popped one back to the segment that pushed it.
class SkipGradients {
 public:
  // Takes the last `pops` of a segment's input gradients and keeps them.
  void take_popped(std::vector<at::Tensor>& input_grads, int64_t pops);
  // Appends kept gradients after the other output gradients of the segment that pushed them.
  void append_pushed(std::vector<at::Tensor>& output_grads, int64_t pushes);

 private:
  std::vector<at::Tensor> waiting_;
};

// The places of a segment's outputs in its graph. A backward needs these, and not the outputs' storage.
using Edges = std::vector<torch::autograd::Edge>;
Edges edges_of(State& state);

struct SegmentGradients {
  std::vector<at::Tensor> weights;  // one per parameter
  std::vector<at::Tensor> inputs;   // one per tensor of the input, in State's order
};

// Carries hidden outputs of segments to a loss that takes them, and their gradients back.
class Taps {
 public:
  explicit Taps(std::vector<size_t> segments) : segments_(std::move(segments)), kept_(segments_.size()) {}

  // Keeps the hidden output of a segment that is tapped, cut from its graph.
  void keep(size_t segment, const State& output);
  const std::vector<at::Tensor>& kept() const { return kept_; }
  // Returns the gradients of a scalar by the weights of a loss's head and, as the one input, by the
  // prediction. Keeps the scalar's gradients by the kept outputs in place of these.
  SegmentGradients loss_gradients(const at::Tensor& scalar, const at::Tensor& prediction,
                                  const ParameterList& of_head);
  // Adds the kept gradient of a segment that is tapped to the first of its output gradients, that of
  // `hidden`.
  void add_gradient(size_t segment, std::vector<at::Tensor>& output_grads);

 private:
  std::vector<size_t> segments_;
  std::vector<at::Tensor> kept_;  // one for each of the segments
};

// Computes the gradients of a segment's `parameters` and `input` from those of its outputs, in State's order.
// An entry is undefined where there is no gradient or none is asked for. Frees the graph with its
// activations, the input and `output_grads`.
SegmentGradients backward_through(Edges outputs, std::vector<at::Tensor> output_grads,
                                  const ParameterList& parameters, State input);

}  // namespace kiln
