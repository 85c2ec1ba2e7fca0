// Losses over outputs of segments: the walk's gradients against one autograd pass over the whole model.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/tiny_model.h"

namespace kiln {
namespace {

using test::TinyOptions, test::TinyTraining;

// The loss of epsilon, and the squares of what some segments put out, each with a weight of its own.
class TappedObjective : public Objective {
 public:
  explicit TappedObjective(std::vector<size_t> taps) : taps_(std::move(taps)) {}
  at::Tensor timesteps(const at::Tensor& u) const override { return inner_->timesteps(u); }
  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                        const at::Tensor& timesteps) const override {
    return inner_->add_noise(x_0, noise, timesteps);
  }
  std::vector<std::string> term_names() const override { return {"mse", "squares"}; }
  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    const at::Tensor mse = inner_->loss(prediction, x_0, noise, noised).loss;
    at::Tensor squares = at::zeros_like(mse);
    for (size_t i = 0; i < noised.taps.size(); ++i)
      squares = squares + noised.taps[i].to(at::kFloat).square().flatten(1).mean(1) *
                              (0.5 + 0.1 * static_cast<double>(i));
    return {.loss = mse + squares, .terms = {mse, squares}};
  }
  at::Tensor position(const at::Tensor& timesteps) const override { return inner_->position(timesteps); }
  bool learns_sigma() const override { return false; }
  std::vector<size_t> taps() const override { return taps_; }

 private:
  std::unique_ptr<Objective> inner_ = make_objective(objective_config("epsilon"));
  std::vector<size_t> taps_;
};

TinyOptions tapped(std::vector<size_t> taps) {
  return {.accumulate_f32 = true,
          .make_objective = [taps] { return std::make_unique<TappedObjective>(taps); }};
}

// d(mean loss) / d(weights) of all trained weights in one autograd pass, segment by segment.
at::Tensor plain_gradients(const TinyTraining& tiny, const StepBatch& batch) {
  at::AutoGradMode with_graph(true);
  NoisedBatch noised = tiny.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const ModelInput input{.x_t = noised.x_t, .timesteps = noised.model_t, .conditioning = batch.conditioning};
  State state;
  std::vector<at::Tensor> outputs, leaves, grads;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    state = tiny.denoiser->segments()[s]->forward(state, input);
    outputs.push_back(state.hidden);
    for (const auto& parameter : tiny.state->segments[s].parameters) leaves.push_back(parameter->value);
  }
  for (const size_t tap : tiny.objective->taps()) noised.taps.push_back(outputs[tap]);
  const at::Tensor loss = tiny.objective->loss(state.hidden, batch.x_0, batch.noise, noised).loss;
  for (const at::Tensor& grad : torch::autograd::grad({loss.mean()}, leaves)) grads.push_back(grad.flatten());
  return at::cat(grads);
}

// Those of the last step, whole on every rank.
at::Tensor gradients_of_step(const TinyTraining& tiny) {
  std::vector<at::Tensor> grads;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    const TrainingState::SegmentWeights& segment = tiny.state->segments[s];
    const at::Tensor whole = tiny.state->zero->whole(s, segment.unit.grad_shard);
    for (size_t i = 0; i < segment.parameters.size(); ++i)
      grads.push_back(segment.unit.view(whole, i).flatten().to(at::kFloat));
  }
  return at::cat(grads);
}

double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  return ((found - expected).norm() / expected.norm()).item<double>();
}

TEST(Taps, GradientsAreThoseOfOnePassWhateverIsRecomputed) {
  using enum Activations;
  for (const std::vector<size_t>& taps : {std::vector<size_t>{1}, {2, 1}, {0, 3}}) {
    const TinyTraining tiny(tapped(taps));
    const StepBatch batch = tiny.batch(6);
    const at::Tensor expected = plain_gradients(tiny, batch);
    at::Tensor kept;
    for (const Activations choice : {kKeep, kRecompute, kOffload}) {
      TinyOptions options = tapped(taps);
      options.memory.assign(4, {choice});
      const TinyTraining run(options);
      const StepResult result = run.step->run(batch, 0);
      EXPECT_GT(result.terms.at(1), 0);
      const at::Tensor found = gradients_of_step(run);
      EXPECT_LE(relative_error(found, expected), 1e-5);
      if (!kept.defined()) kept = found;
      EXPECT_TRUE(at::equal(found, kept)) << "the same bits";
    }
  }
}

TEST(Taps, AddUpOverMicroBatchesAndDividedRanks) {
  const TinyTraining tiny(tapped({1, 2}));
  const StepBatch batch = tiny.batch(7);
  const at::Tensor expected = plain_gradients(tiny, batch);
  for (const int64_t world_size : {1, 2, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const int64_t stage : {0, 3})
        for (const int64_t micro_batch : {0, 1, 3}) {
          TinyOptions options = tapped({1, 2});
          options.micro_batch = micro_batch;
          options.memory.assign(4, {Activations::kRecompute});
          options.group = group;
          options.zero.stage = stage;
          const TinyTraining run(options);
          run.step->run(test::rows_of(batch, *group), 0);
          EXPECT_LE(relative_error(gradients_of_step(run), expected), 1e-5)
              << world_size << " ranks, stage " << stage << ", micro-batches of " << micro_batch;
        }
    });
}

TEST(Taps, OfNoSegmentAreRefused) {
  EXPECT_ERROR(TinyTraining(tapped({4})), "expected a loss that taps one of 4 segments, got 4");
}

}  // namespace
}  // namespace kiln
