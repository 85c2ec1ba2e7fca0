// A two-block DiT with random weights everywhere (zero-initialised paths included), ready to take steps.
#pragma once
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "core/aten.h"
#include "core/error.h"
#include "data/loader/batches.h"
#include "diffusion/alignment.h"
#include "diffusion/objective.h"
#include "models/registry.h"
#include "optim/optimizer.h"
#include "step/step.h"
#include "step/training_state.h"
#include "train/skip_model.h"

namespace kiln::test {

struct TinyOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  bool accumulate_f32 = false;
  int64_t micro_batch = 0;
  double max_grad_norm = 0;
  std::vector<double> ema_decays = {0.9};
  std::vector<MemoryChoice> memory{};
  std::string objective = "iddpm";
  double contrastive_weight = 0;  // of flow
  double align_weight = 0;
  std::function<std::unique_ptr<Objective>()> make_objective{};  // a test's own, instead
  bool has_skips = false;  // another tiny model (skip_model.h), for objectives that do not learn sigma
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();
  ZeroOptions zero{};
  OffloadOptions offload{};
  bool updates_unread = true;
  std::optional<at::Device> update_beside{};
  int64_t depth = 2, hidden_size = 48;
  ops::Products products = ops::Products::kComputeDtype;
  nlohmann::json optimizer_config = {{"type", "adamw"}};
  LossScalerOptions loss_scaler{};
  std::optional<GraphOptions> graphs{};
  ops::OpChoices op_choices{};
};

struct TinyTraining {
  explicit TinyTraining(const TinyOptions& options)
      : objective(objective_of(options)), optimizer(make_optimizer(options.optimizer_config)) {
    at::set_num_threads(1);  // tiny tensors: threads would only wait for each other
    const nlohmann::json config = {{"input_size", 8},
                                   {"patch_size", 2},
                                   {"in_channels", 4},
                                   {"hidden_size", options.hidden_size},
                                   {"depth", options.depth},
                                   {"num_heads", 3},
                                   {"mlp_ratio", 4},
                                   {"num_classes", 5},
                                   {"class_dropout_prob", 0.1},
                                   {"learn_sigma", objective->learns_sigma()}};
    const BuildOptions build{
        .device = options.device, .compute_dtype = options.compute_dtype, .products = options.products};
    if (options.has_skips)
      denoiser = std::make_unique<SkipModel>(build);
    else
      denoiser = build_denoiser("dit", config, build);
    if (options.align_weight > 0)
      objective = with_alignment(std::move(objective), options.align_weight, *denoiser,
                                 {.device = options.device, .compute_dtype = options.compute_dtype});
    if (!options.device.is_meta()) {
      ParameterList parameters = denoiser->parameters();
      if (const Segment* head = objective->head())
        parameters.insert(parameters.end(), head->parameters().begin(), head->parameters().end());
      at::Generator generator = at::detail::createCPUGenerator(7);
      for (const auto& parameter : parameters)
        parameter->value.copy_(at::randn(parameter->value.sizes(), generator) * 0.05);
    }
    state = std::make_unique<TrainingState>(
        *denoiser, *optimizer,
        TrainingStateOptions{.device = options.device,
                             .compute_dtype = options.compute_dtype,
                             .grad_dtype = options.accumulate_f32 ? at::kFloat : options.compute_dtype,
                             .ema_decays = options.ema_decays,
                             .loss_scaler = options.loss_scaler,
                             .group = options.group,
                             .zero = options.zero,
                             .offload = options.offload,
                             .head = objective->head()});
    step = std::make_unique<TrainStep>(*denoiser, *objective, *optimizer, *state,
                                       StepOptions{.device = options.device,
                                                   .micro_batch = options.micro_batch,
                                                   .max_grad_norm = options.max_grad_norm,
                                                   .memory = options.memory,
                                                   .op_choices = options.op_choices,
                                                   .updates_unread = options.updates_unread,
                                                   .update_beside = options.update_beside,
                                                   .graphs = options.graphs});
  }

  // Random rows; t = 0 is left out, whose likelihood term is ill-conditioned in f32.
  StepBatch batch(int64_t size, uint64_t seed = 0) const {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    StepBatch drawn{.x_0 = at::randn({size, 4, 8, 8}, generator),
                    .noise = at::randn({size, 4, 8, 8}, generator),
                    .timesteps = at::randint(1, 1000, {size}, generator, at::kLong),
                    .conditioning = {.class_labels = at::randint(0, 6, {size}, generator, at::kLong)}};
    if (!objective->compares_samples()) return drawn;
    drawn.timesteps = drawn.timesteps.to(at::kFloat) / 1000;  // a flow's
    drawn.halo_x_0 = drawn.x_0.narrow(0, size - 1, 1);
    drawn.halo_noise = drawn.noise.narrow(0, size - 1, 1);
    drawn.halo_timesteps = drawn.timesteps.narrow(0, size - 1, 1);
    return drawn;
  }

  std::unique_ptr<Denoiser> denoiser;
  std::unique_ptr<Objective> objective;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingState> state;
  std::unique_ptr<TrainStep> step;

 private:
  static std::unique_ptr<Objective> objective_of(const TinyOptions& options) {
    if (options.make_objective) return options.make_objective();
    nlohmann::json config = objective_config(options.objective);
    if (options.contrastive_weight > 0) config["contrastive_lambda"] = options.contrastive_weight;
    return kiln::make_objective(config);
  }
};

// The rows of a global batch that are this rank's.
inline StepBatch rows_of(const StepBatch& global, const ProcessGroup& group) {
  const RowRange rows = rank_rows(global.size(), group.rank(), group.world_size());
  StepBatch mine = slice_rows(global, rows.first, rows.count, global.x_0.device());
  mine.first_row = rows.first;
  mine.global_batch = global.size();
  return mine;
}

// The worst difference as a share of b[i]; both have as many numbers.
inline double worst_relative(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return worst;
}

}  // namespace kiln::test
