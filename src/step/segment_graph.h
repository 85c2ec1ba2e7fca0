// The autograd graph of one segment, cut off from all others: what its forward leaves of it and how its
// backward runs.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

#include "models/model.h"

namespace kiln {

// The same tensors, cut from whatever graph they come from; leaves that collect a gradient when `with_grad`.
State detached(State state, bool with_grad);
// The same, where those collect one that require one: what trained weights have shaped.
State detached(State state);
bool any_requires_grad(State& state);
// After a forward without a graph, whose outputs require no gradient: those that a backward will have to ask
// for one do, as after a forward with a graph. `input` of the segment, `output` of it, and whether it
// `trains` weights. What the segment only hands on stays what it was.
void mark_trained(const State& input, State& output, bool trains);

// Gradients of skip connections, from the segment that popped one back to the segment that pushed it.
class SkipGradients {
 public:
  // The last `pops` of a segment's input gradients wait here.
  void take_popped(std::vector<at::Tensor>& input_grads, int64_t pops);
  // They follow the other output gradients of the segment that pushed them.
  void append_pushed(std::vector<at::Tensor>& output_grads, int64_t pushes);

 private:
  std::vector<at::Tensor> waiting_;
};

// Where a segment's outputs hang in its graph: what a backward needs of them, without their storage.
using Edges = std::vector<torch::autograd::Edge>;
Edges edges_of(State& state);

// The gradient of a scalar with respect to one leaf, as the output gradients of a segment: one entry.
std::vector<at::Tensor> gradient_of(const at::Tensor& scalar, const at::Tensor& leaf);

struct SegmentGradients {
  std::vector<at::Tensor> weights;  // one per parameter
  std::vector<at::Tensor> inputs;   // one per tensor of the input, in State's order
};
// From the gradients of a segment's outputs, in State's order, those of its `parameters` and of its `input`;
// undefined where there is none, or none is asked for. Frees the graph with its activations, the input and
// `output_grads`.
SegmentGradients backward_through(Edges outputs, std::vector<at::Tensor> output_grads,
                                  const ParameterList& parameters, State input);

}  // namespace kiln
