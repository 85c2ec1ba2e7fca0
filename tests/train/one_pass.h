// The gradients of a step against one autograd pass over the whole model and the loss.
#pragma once
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "train/tiny_model.h"

namespace kiln::test {

// d(mean loss) / d(weights) of all trained weights in one autograd pass, segment by segment, then those of
// the loss's head.
inline at::Tensor one_pass_gradients(const TinyTraining& tiny, const StepBatch& batch) {
  at::AutoGradMode with_graph(true);
  NoisedBatch noised = tiny.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const ModelInput input{.x_t = noised.x_t, .timesteps = noised.model_t, .conditioning = batch.conditioning};
  State state;
  std::vector<at::Tensor> outputs, leaves, grads;
  for (const auto& segment : tiny.denoiser->segments()) {
    state = segment->forward(state, input);
    outputs.push_back(state.hidden);
  }
  for (const auto& weights : tiny.state->segments)
    for (const auto& parameter : weights.parameters) leaves.push_back(parameter->value);
  for (const size_t tap : tiny.objective->taps()) noised.taps.push_back(outputs[tap]);
  const at::Tensor loss = tiny.objective->loss(state.hidden, batch.x_0, batch.noise, noised).loss;
  for (const at::Tensor& grad : torch::autograd::grad({loss.mean()}, leaves)) grads.push_back(grad.flatten());
  return at::cat(grads);
}

// Those of the last step, whole on every rank.
inline at::Tensor gradients_of_step(const TinyTraining& tiny) {
  std::vector<at::Tensor> grads;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    const TrainingState::SegmentWeights& segment = tiny.state->segments[s];
    const at::Tensor whole = tiny.state->zero->whole(s, segment.unit.grad_shard);
    for (size_t i = 0; i < segment.parameters.size(); ++i)
      grads.push_back(segment.unit.view(whole, i).flatten().to(at::kFloat));
  }
  return at::cat(grads);
}

inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  return ((found - expected).norm() / expected.norm()).item<double>();
}

}  // namespace kiln::test
