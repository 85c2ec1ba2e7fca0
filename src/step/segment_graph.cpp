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

// The graph edges at which the gradients of leaves arrive. Making the edge of a leaf that the graph does not
// use costs nothing.
class LeafEdges {
 public:
  void add(const at::Tensor& leaf) {
    is_asked_.push_back(leaf.requires_grad());
    if (leaf.requires_grad()) edges_.push_back(torch::autograd::impl::gradient_edge(leaf));
  }
  const Edges& edges() const { return edges_; }
  // Returns the gradients of all leaves, undefined for those that want none.
  std::vector<at::Tensor> spread(std::vector<at::Tensor> found) const {
    std::vector<at::Tensor> all;
    auto next = found.begin();
    for (const bool is_asked : is_asked_)
      all.push_back(is_asked && next != found.end() ? std::move(*next++) : at::Tensor());
    return all;
  }

 private:
  Edges edges_;
  std::vector<bool> is_asked_;
};

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

State detached(State state) {
  state.visit([](at::Tensor& tensor) {
    const bool with_grad = tensor.requires_grad();
    tensor = tensor.detach().set_requires_grad(with_grad);
  });
  return state;
}

bool any_requires_grad(State& state) {
  bool any = false;
  state.visit([&](const at::Tensor& tensor) { any = any || tensor.requires_grad(); });
  return any;
}

void mark_trained(const State& input, State& output, bool trains) {
  State before = input;
  const bool is_shaped = trains || any_requires_grad(before);
  output.visit([&](at::Tensor& tensor) {
    bool is_handed_on = false;
    before.visit([&](const at::Tensor& given) { is_handed_on = is_handed_on || given.is_same(tensor); });
    if (!is_handed_on && is_shaped) tensor = tensor.detach().set_requires_grad(true);
  });
}

Edges edges_of(State& state) {
  Edges edges;
  for (const at::Tensor& tensor : tensors_of(state))
    edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                           : torch::autograd::Edge());
  return edges;
}

void Taps::keep(size_t segment, const State& output) {
  for (size_t i = 0; i < segments_.size(); ++i)
    if (segments_[i] == segment) kept_[i] = output.hidden.detach().set_requires_grad(true);
}

SegmentGradients Taps::loss_gradients(const at::Tensor& scalar, const at::Tensor& prediction,
                                      const ParameterList& of_head) {
  std::vector<at::Tensor> leaves = {prediction};
  leaves.insert(leaves.end(), kept_.begin(), kept_.end());
  for (const auto& parameter : of_head) leaves.push_back(parameter->value);
  std::vector<at::Tensor> grads = torch::autograd::grad({scalar}, leaves);
  const auto first_kept = std::make_move_iterator(grads.begin() + 1);
  const auto first_weight = first_kept + std::ssize(kept_);
  kept_.assign(first_kept, first_weight);
  return {.weights = {first_weight, std::make_move_iterator(grads.end())}, .inputs = {grads.front()}};
}

void Taps::add_gradient(size_t segment, std::vector<at::Tensor>& output_grads) {
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i] != segment) continue;
    at::Tensor& hidden = output_grads.front();
    hidden = hidden.defined() ? hidden + kept_[i] : kept_[i];
    kept_[i].reset();
  }
}

SegmentGradients backward_through(Edges outputs, std::vector<at::Tensor> output_grads,
                                  const ParameterList& parameters, State input) {
  Edges roots;
  LeafEdges leaves;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < output_grads.size(); ++i) {
    if (!output_grads[i].defined() || !outputs[i].is_valid()) continue;
    roots.push_back(std::move(outputs[i]));
    root_grads.push_back(std::move(output_grads[i]));
  }
  for (const auto& parameter : parameters) leaves.add(parameter->value);
  for (const at::Tensor& tensor : tensors_of(input)) leaves.add(tensor);

  std::vector<at::Tensor> found;
  if (!roots.empty() && !leaves.edges().empty())
    found = torch::autograd::Engine::get_default_engine().execute(roots, root_grads, /*keep_graph=*/false,
                                                                  /*create_graph=*/false,
                                                                  /*accumulate_grad=*/false, leaves.edges());
  SegmentGradients grads{.weights = leaves.spread(std::move(found)), .inputs = {}};
  const auto first_input = grads.weights.begin() + static_cast<int64_t>(parameters.size());
  grads.inputs.assign(std::make_move_iterator(first_input), std::make_move_iterator(grads.weights.end()));
  grads.weights.erase(first_input, grads.weights.end());
  return grads;
}

}  // namespace kiln
