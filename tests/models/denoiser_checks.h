// What the tests of denoisers share.
#pragma once
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "core/aten.h"
#include "models/model.h"
#include "models/parts/init.h"
#include "models/weights.h"
#include "test_files.h"

namespace kiln {

// The trainable weights, as leaves that collect gradients.
inline std::vector<at::Tensor> require_gradients(const ParameterList& parameters) {
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : parameters)
    if (parameter->trainable) leaves.push_back(parameter->value.set_requires_grad(true));
  return leaves;
}

// Every path carries a signal: weights that begin as zeros are drawn too.
inline void draw_trained_weights(const Denoiser& denoiser, double matrices, double vectors) {
  initialize_weights(denoiser, 0);
  for (const auto& parameter : denoiser.parameters())
    if (parameter->trainable)
      initialize(Init::normal(parameter->value.dim() > 1 ? matrices : vectors), 1, parameter->key,
                 parameter->value);
}

inline std::vector<std::string> names_of_segments(const Denoiser& denoiser) {
  std::vector<std::string> names;
  for (const auto& segment : denoiser.segments()) names.push_back(segment->name());
  return names;
}

inline const nlohmann::json kTinyUnet = {{"sample_size", 8},
                                         {"block_out_channels", {8, 16}},
                                         {"layers_per_block", 2},
                                         {"down_block_types", {"CrossAttnDownBlock2D", "DownBlock2D"}},
                                         {"up_block_types", {"UpBlock2D", "CrossAttnUpBlock2D"}},
                                         {"norm_num_groups", 4},
                                         {"cross_attention_dim", 12},
                                         {"attention_head_dim", 2}};

// Walks forward on detached states, then backward one segment at a time: bitwise plain autograd.
inline void expect_walk_equals_plain_autograd(const Denoiser& denoiser, const ModelInput& input) {
  const std::vector<at::Tensor> leaves = require_gradients(denoiser.parameters());
  const at::Tensor output = denoiser.forward(input);
  const at::Tensor grad_output = at::randn_like(output);
  const auto expected = torch::autograd::grad({output}, leaves, {grad_output});

  std::vector<State> inputs, outputs;
  State state;
  for (const auto& segment : denoiser.segments()) {
    state.visit([](at::Tensor& tensor) { tensor = tensor.detach().set_requires_grad(true); });
    inputs.push_back(state);
    state = segment->forward(state, input);
    outputs.push_back(state);
  }
  EXPECT_TRUE(at::equal(state.hidden, output));

  std::vector<at::Tensor> gradients(1, grad_output), walked;
  for (size_t i = denoiser.segments().size(); i-- > 0;) {
    std::vector<at::Tensor> produced, wanted = require_gradients(denoiser.segments()[i]->parameters());
    const size_t num_parameters = wanted.size();
    outputs[i].visit([&](at::Tensor& tensor) { produced.push_back(tensor); });
    inputs[i].visit([&](at::Tensor& tensor) { wanted.push_back(tensor); });
    gradients.resize(produced.size());  // the last block's text goes nowhere
    std::vector<at::Tensor> given, of;
    for (size_t j = 0; j < produced.size(); ++j)
      if (gradients[j].defined()) {
        given.push_back(gradients[j]);
        of.push_back(produced[j]);
      }
    // A tensor that passes through untouched gets the gradient of both its uses.
    const auto found = torch::autograd::grad(of, wanted, given, std::nullopt, false, /*allow_unused=*/true);
    gradients.assign(found.begin() + num_parameters, found.end());
    walked.insert(walked.begin(), found.begin(), found.begin() + num_parameters);
  }
  ASSERT_EQ(walked.size(), expected.size());
  for (size_t i = 0; i < walked.size(); ++i) EXPECT_TRUE(at::equal(walked[i], expected[i])) << i;
}

// Training holds weights in the compute dtype; autocast casts f32 ones: the same numbers wherever a weight
// enters a product, and close to them where a table is added. `denoiser` computes in bf16.
inline void expect_weights_may_be_rebound(const Denoiser& denoiser, const ModelInput& input, double bound) {
  const at::NoGradGuard no_grad;
  const at::Tensor cast = denoiser.forward(input);
  for (const auto& parameter : denoiser.parameters())
    if (parameter->trainable) parameter->value = parameter->value.to(at::kBFloat16);
  const at::Tensor rebound = denoiser.forward(input);
  EXPECT_EQ(rebound.scalar_type(), at::kFloat);
  EXPECT_LT((rebound - cast).norm().item<double>() / cast.norm().item<double>(), bound);
  for (const auto& parameter : denoiser.parameters()) parameter->value = at::zeros_like(parameter->value);
  EXPECT_FALSE(denoiser.forward(input).any().item<bool>()) << "a segment kept an old weight";
}

// `meta`: the same model on device meta.
inline void expect_the_same_on_meta(const Denoiser& real, const Denoiser& meta, const ModelInput& input) {
  const ModelInput meta_input = {.x_t = input.x_t.to(at::kMeta),
                                 .timesteps = input.timesteps.to(at::kMeta),
                                 .conditioning = to_device(input.conditioning, at::kMeta)};
  const auto meta_leaves = require_gradients(meta.parameters());
  const at::Tensor expected = real.forward(input), output = meta.forward(meta_input);
  EXPECT_EQ(output.sizes(), expected.sizes());
  EXPECT_EQ(output.strides(), expected.strides());
  EXPECT_EQ(output.scalar_type(), expected.scalar_type());
  const auto gradients = torch::autograd::grad({output}, meta_leaves, {at::empty_like(output)});
  for (size_t i = 0; i < gradients.size(); ++i) EXPECT_EQ(gradients[i].sizes(), meta_leaves[i].sizes());
}

}  // namespace kiln
