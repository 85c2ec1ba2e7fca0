// A model of one weight whose gradient is the data itself, and plain gradient descent: steps can be checked
// by hand.
#pragma once

#include <memory>

#include "core/aten.h"
#include "data/loader/batches.h"
#include "diffusion/objective.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "step/step.h"
#include "step/training_state.h"

namespace kiln::test {

// prediction = weight * x_t.
class OneWeight : public Denoiser {
 public:
  OneWeight() {
    segments_.push_back(std::make_unique<Scale>());
    shape_.in_channels = shape_.out_channels = 1;
  }

 private:
  class Scale : public Segment {
   public:
    Scale() {
      name_ = "scale";
      auto weight = std::make_shared<Parameter>();
      weight->key = "weight";
      weight->value = at::zeros({1});
      parameters_ = {weight};
    }
    State forward(const State&, const ModelInput& input) const override {
      State state;
      state.hidden = parameters_[0]->value * input.x_t;
      return state;
    }
  };
};

// loss = mean of the prediction, so that d loss / d weight is the mean of x_0.
class LinearObjective : public Objective {
 public:
  at::Tensor timesteps(const at::Tensor& u) const override { return u; }
  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor&,
                        const at::Tensor& timesteps) const override {
    NoisedBatch noised;
    noised.x_t = x_0;
    noised.model_t = noised.timesteps = timesteps;
    return noised;
  }
  LossTerms loss(const at::Tensor& prediction, const at::Tensor&, const at::Tensor&,
                 const NoisedBatch&) const override {
    return {.loss = prediction.mean({1, 2, 3})};
  }
  std::vector<std::string> term_names() const override { return {}; }
  at::Tensor position(const at::Tensor& timesteps) const override { return timesteps; }
  bool learns_sigma() const override { return false; }
};

class GradientDescent : public Optimizer {
 public:
  std::vector<StateBuffer> state(const FlatLayout&) const override { return {}; }
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override {
    slice.master.sub_(slice.grads.to(at::kFloat) * step.grad_scale, step.lr);
    for (const ops::EmaSlice& ema : slice.emas) ema.weights.lerp_(slice.master, 1 - ema.decay);
  }
};

struct OneWeightTraining {
  explicit OneWeightTraining(int64_t micro_batch,
                             std::shared_ptr<ProcessGroup> its_group = std::make_shared<ProcessGroup>())
      : group(std::move(its_group)) {
    state = std::make_unique<TrainingState>(model, optimizer,
                                            TrainingStateOptions{.ema_decays = {0.5}, .group = group});
    step = std::make_unique<TrainStep>(model, objective, optimizer, *state,
                                       StepOptions{.micro_batch = micro_batch});
  }
  // A global batch of one row per value, each a constant picture; this rank takes its rows.
  StepResult run(const std::vector<float>& values, double lr) {
    const int64_t size = static_cast<int64_t>(values.size());
    const RowRange mine = rank_rows(size, group->rank(), group->world_size());
    const at::Tensor x_0 = at::tensor(values)
                               .narrow(0, mine.first, mine.count)
                               .view({mine.count, 1, 1, 1})
                               .expand({mine.count, 1, 2, 2})
                               .contiguous();
    return step->run({.x_0 = x_0,
                      .noise = at::zeros_like(x_0),
                      .timesteps = at::zeros({mine.count}),
                      .first_row = mine.first,
                      .global_batch = size},
                     lr);
  }
  double weight() const { return state->segments[0].unit.master[0].item<double>(); }
  double ema() const { return state->segments[0].unit.emas[0][0].item<double>(); }

  std::shared_ptr<ProcessGroup> group;
  OneWeight model;
  LinearObjective objective;
  GradientDescent optimizer;
  std::unique_ptr<TrainingState> state;
  std::unique_ptr<TrainStep> step;
};

}  // namespace kiln::test
