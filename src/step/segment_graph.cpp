#include "step/segment_graph.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <iterator>
#include <utility>

#include "core/aten.h"

namespace kiln {

namespace {

std::vector<at::Tensor> tensors_of(State& state) {
  std::vector<at::Tensor> tensors;
  state.visit([&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

// Where the gradient of a leaf arrives. Making the edge of a leaf that the graph does not use costs nothing.
torch::autograd::Edge leaf_edge(const at::Tensor& leaf) { return torch::autograd::impl::gradient_edge(leaf); }

}  // namespace

void SkipGradients::take_popped(std::vector<at::Tensor>& input_grads, int64_t pops) {
  const auto first = input_grads.end() - pops;
  waiting_.insert(waiting_.end(), std::make_move_iterator(first), std::make_move_iterator(input_grads.end()));
  input_grads.erase(first, input_grads.end());
}

void SkipGradients::append_pushed(std::vector<at::Tensor>& output_grads, int64_t pushes) {
  const auto first = waiting_.end() - pushes;
  output_grads.insert(output_grads.end(), std::make_move_iterator(first),
                      std::make_move_iterator(waiting_.end()));
  waiting_.erase(first, waiting_.end());
}

State detached(State state, bool with_grad) {
  state.visit([&](at::Tensor& tensor) { tensor = tensor.detach().set_requires_grad(with_grad); });
  return state;
}

Edges edges_of(State& state) {
  Edges edges;
  for (const at::Tensor& tensor : tensors_of(state))
    edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                           : torch::autograd::Edge());
  return edges;
}

std::vector<at::Tensor> gradient_of(const at::Tensor& scalar, const at::Tensor& leaf) {
  return torch::autograd::grad({scalar}, {leaf});
}

SegmentGradients backward_through(Edges outputs, std::vector<at::Tensor> output_grads,
                                  const ParameterList& parameters, State input) {
  Edges roots, leaves;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < output_grads.size(); ++i) {
    if (!output_grads[i].defined() || !outputs[i].is_valid()) continue;
    roots.push_back(std::move(outputs[i]));
    root_grads.push_back(std::move(output_grads[i]));
  }
  for (const auto& parameter : parameters) leaves.push_back(leaf_edge(parameter->value));
  for (const at::Tensor& tensor : tensors_of(input)) leaves.push_back(leaf_edge(tensor));

  SegmentGradients grads{.weights = torch::autograd::Engine::get_default_engine().execute(
                             roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false,
                             /*accumulate_grad=*/false, leaves),
                         .inputs = {}};
  const auto first_input = grads.weights.begin() + static_cast<int64_t>(parameters.size());
  grads.inputs.assign(std::make_move_iterator(first_input), std::make_move_iterator(grads.weights.end()));
  grads.weights.erase(first_input, grads.weights.end());
  return grads;
}

}  // namespace kiln
