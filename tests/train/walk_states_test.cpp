// The walk over states that DiT does not have: skip connections, captions, tensors that pass through
// segments, weights without a gradient.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "issues/one_weight.h"
#include "train/step.h"

namespace kiln {
namespace {

class ToySegment : public Segment {
 public:
  using Forward = std::function<State(const State&, const DenoiserInput&, const ParameterList&)>;
  ToySegment(const std::string& name, int num_weights, Forward forward) : forward_(std::move(forward)) {
    name_ = name;
    for (int i = 0; i < num_weights; ++i) {
      auto parameter = std::make_shared<Parameter>();
      parameter->key = fmt::format("{}.{}", name, i);
      parameter->value =
          at::randn({6, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(i) + name.size()));
      parameters_.push_back(parameter);
    }
  }
  State forward(const State& state, const DenoiserInput& input) const override {
    return forward_(state, input, parameters_);
  }

 private:
  Forward forward_;
};

// embed -> down -> middle -> up: `up` takes the skips of both, `middle` alone looks at the caption, the last
// weight of `middle` is not used.
class ToyUnet : public Denoiser {
 public:
  ToyUnet() {
    const auto add = [&](const std::string& name, int num_weights, ToySegment::Forward forward) {
      segments_.push_back(std::make_unique<ToySegment>(name, num_weights, std::move(forward)));
    };
    add("embed", 2, [](const State&, const DenoiserInput& input, const ParameterList& weights) {
      State state;
      state.hidden = input.x_t.matmul(weights[0]->value);
      state.text = input.text_embeds.matmul(weights[1]->value);
      state.conditioning = input.timesteps.sin().view({-1, 1, 1, 1}) * weights[1]->value.sum();
      state.skips = {state.hidden};
      return state;
    });
    add("down", 1, [](const State& in, const DenoiserInput&, const ParameterList& weights) {
      State state = in;
      state.hidden = (in.hidden.matmul(weights[0]->value) + in.conditioning).tanh();
      state.skips.push_back(state.hidden);
      return state;
    });
    add("middle", 2, [](const State& in, const DenoiserInput&, const ParameterList& weights) {
      State state = in;
      state.hidden = in.hidden.matmul(weights[0]->value) * in.text.mean() + in.conditioning * in.conditioning;
      return state;
    });
    add("up", 1, [](const State& in, const DenoiserInput&, const ParameterList& weights) {
      State state;
      state.hidden = (in.hidden + in.skips[1]).matmul(weights[0]->value) * in.skips[0];
      return state;
    });
  }
};

TEST(WalkStates, SkipsCaptionsAndUnusedWeightsEqualPlainAutogradBitwise) {
  const test::LinearObjective objective;
  const test::GradientDescent optimizer;
  at::Generator generator = at::detail::createCPUGenerator(5);
  const StepBatch batch{.x_0 = at::randn({3, 1, 6, 6}, generator),
                        .noise = at::zeros({3, 1, 6, 6}),
                        .timesteps = at::rand({3}, generator),
                        .text_embeds = at::randn({3, 4, 6}, generator),
                        .text_mask = at::ones({3, 4})};
  for (int mask = 0; mask < 16; ++mask) {  // every mixture of keeping and recomputing
    ToyUnet model;
    TrainingState state(model, optimizer, {.ema_decays = {}});
    StepOptions options;
    options.memory.resize(4);
    for (int i = 0; i < 4; ++i)
      if (mask >> i & 1) options.memory[static_cast<size_t>(i)].activations = Activations::kRecompute;

    std::vector<at::Tensor> leaves;
    for (const auto& parameter : model.parameters()) leaves.push_back(parameter->value);
    at::AutoGradMode with_graph(true);
    const at::Tensor prediction = model.forward({.x_t = batch.x_0,
                                                 .timesteps = batch.timesteps,
                                                 .text_embeds = batch.text_embeds,
                                                 .text_mask = batch.text_mask});
    const auto expected =
        torch::autograd::grad({prediction.mean({1, 2, 3}).sum() * (1.0 / 3)}, leaves, {}, {}, false, true);

    TrainStep step(model, objective, optimizer, state, options);
    for (auto& segment : state.segments) segment.unit.grads.fill_(7);  // stale gradients must not survive
    ASSERT_TRUE(step.run(batch, 0).applied);
    size_t next = 0;
    for (const auto& segment : state.segments)
      for (const at::Tensor& grad : segment.grad_views) {
        const at::Tensor& want = expected[next++];
        EXPECT_TRUE(at::equal(grad, want.defined() ? want : at::zeros_like(grad))) << next << " " << mask;
      }
    EXPECT_EQ(next, 6u);
  }
}

}  // namespace
}  // namespace kiln
