// Builds model, training state and step from options, for a run that trains and for a dry run that plans.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "data/store/data_shape.h"
#include "diffusion/objective.h"
#include "models/lora.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "run/train_options.h"
#include "step/step.h"
#include "step/training_state.h"

namespace kiln {

// The shape of --data synthetic: latents of the model's published autoencoder at --image-size, or pixels with
// --autoencoder pixels, with all that the model is told. Throws Error when the image size does not fit.
DataShape synthetic_shape(const TrainOptions& options);

// What the model of the options is told beside the picture, on samples of this shape, whose captions are left
// out of account. Throws Error.
ConditioningShape conditioning_of(const TrainOptions& options, DataShape data);

// The full model config that the options resolve to. Throws Error.
nlohmann::json denoiser_config_of(const TrainOptions& options, const DataShape& data,
                                  const Objective& objective);

// How the options divide the training state. Throws Error: fewer images than ranks.
ZeroOptions zero_options_of(const TrainOptions& options, int64_t world_size);

// The images that a rank walks at once in a step: --micro-batch, or all that the fullest rank has of a step.
int64_t rows_of_walk(const TrainOptions& options, int64_t world_size);
// The images that a rank walks at once in a validation. --validation-images may leave fewer.
int64_t rows_of_validation(const TrainOptions& options, int64_t world_size);

// The training state of a rank of `group`, but for the first values of its weights. Throws Error.
TrainingStateOptions state_options_of(const TrainOptions& options, at::Device device,
                                      std::shared_ptr<ProcessGroup> group);

struct Training {
  std::unique_ptr<Objective> objective;
  std::unique_ptr<Optimizer> optimizer;
  nlohmann::json model_config{};  // as resolved
  std::unique_ptr<Denoiser> denoiser{};
  std::vector<LoraLayer> lora{};  // what is trained instead of the denoiser; empty: the denoiser itself
  std::unique_ptr<TrainingState> state{};
  std::unique_ptr<TrainStep> step{};
};
// Multiply-adds times two of one image's step. Backward is twice the forward, or once where the weights are
// frozen: an adapter's own products are few beside them.
double flops_of_image(const Training& training);

// Weights are initialised or loaded as the options say, except on meta. The state is divided among `group`,
// which a dry run makes of the ranks that it stands for. Throws Error.
Training build_training(const TrainOptions& options, const DataShape& data, at::Device device,
                        std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>());

}  // namespace kiln
