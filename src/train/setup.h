// From options to model, training state and step: the same for a run that trains and for a dry run that
// plans.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/objective.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "train/step.h"
#include "train/train_config.h"
#include "train/training_state.h"

namespace kiln {

// Of one sample, as the model sees it.
struct DataShape {
  int64_t channels = 0, height = 0, width = 0;
  int64_t num_classes = 0;  // 0: no labels
};
// Of --data synthetic: latents of KL-f8 at --image-size, or its pixels with --autoencoder pixels. Throws
// Error when the image size does not fit.
DataShape synthetic_shape(const TrainOptions& options);

// The full model config that the options resolve to. Throws Error.
nlohmann::json denoiser_config_of(const TrainOptions& options, const DataShape& data,
                                  const Objective& objective);

// How the options divide the training state. Throws Error: fewer images than ranks.
ZeroOptions zero_options_of(const TrainOptions& options, int64_t world_size);

// Images that a rank walks at once in a step, of the rank that has the most of a step:
// all of them where --micro-batch is 0 or more than that.
int64_t rows_of_walk(const TrainOptions& options, int64_t world_size);
// The same of a validation, for which --validation-images may leave less.
int64_t rows_of_validation(const TrainOptions& options, int64_t world_size);

struct Training {
  std::unique_ptr<Objective> objective;
  std::unique_ptr<Optimizer> optimizer;
  nlohmann::json model_config{};  // as resolved
  std::unique_ptr<Denoiser> denoiser{};
  std::unique_ptr<TrainingState> state{};
  std::unique_ptr<TrainStep> step{};
};
// Weights are initialised or loaded as the options say, except on meta. The state is divided among `group`,
// which a dry run makes of the ranks that it stands for. Throws Error.
Training build_training(const TrainOptions& options, const DataShape& data, at::Device device,
                        std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>());

}  // namespace kiln
