// Builds model, training state and step from options, for training and for a dry run that plans.
#pragma once
#include <memory>
#include <string>

#include "core/json.h"
#include "data/loader/batch.h"
#include "diffusion/objective.h"
#include "models/forward_flops.h"
#include "models/lora.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "run/train_options.h"
#include "step/step.h"
#include "step/training_state.h"
#include "train/dataset/data_description.h"

namespace kiln {

// Returns what the run of these options asks of its data. Throws Error: an unknown model.
DataAsks asks_of(const TrainOptions& options);
// Describes --data; without it what a plan takes for them. Throws Error as describe() of its source does.
DataDescription describe(const TrainOptions& options);
// Returns the shape of --data synthetic, whatever --data is: latents of the model's published autoencoder at
// --image-size, or pixels with --autoencoder pixels, with all that the model is told. Throws Error if the
// image size does not fit.
DataShape synthetic_shape(const TrainOptions& options);

// Returns the full model config that the options resolve to. Throws Error.
nlohmann::json denoiser_config_of(const TrainOptions& options, const DataShape& data,
                                  const Objective& objective);

// Returns how the options divide the training state. Throws Error: fewer images than ranks.
ZeroOptions zero_options_of(const TrainOptions& options, int64_t world_size);

// Returns how many images a rank walks at once in a step: --micro-batch, or all images of the rank with the
// most.
int64_t rows_of_walk(const TrainOptions& options, int64_t world_size);
// Returns how many the last walk of a step has on that rank. It has fewer where --micro-batch leaves a rest.
int64_t rows_of_last_walk(const TrainOptions& options, int64_t world_size);
// Returns how many images a rank walks at once in a validation of `images`, 0 if that is not known: as in a
// step, or fewer if there are no more.
int64_t rows_of_validation(const TrainOptions& options, int64_t images, int64_t world_size);

// Returns how a run's batches are made, but for its rank, where it begins and what its model decides.
BatchOptions batch_options_of(const TrainOptions& options);

// Returns the options of the training state for a rank of `group`, without the first values of its weights.
// Throws Error.
TrainingStateOptions state_options_of(const TrainOptions& options, at::Device device,
                                      std::shared_ptr<ProcessGroup> group);

struct Training {
  std::unique_ptr<Objective> objective;
  std::unique_ptr<Optimizer> optimizer;
  nlohmann::json model_config{};  // as resolved
  std::unique_ptr<ForwardFlops> forward_flops{};
  std::unique_ptr<Denoiser> denoiser{};
  bool has_null_rows = true;      // false: --weights lacks those that the model has, which are zeros then
  std::vector<LoraLayer> lora{};  // trained instead of the denoiser; empty: the denoiser itself is trained
  std::unique_ptr<TrainingState> state{};
  std::unique_ptr<TrainStep> step{};
};
// Returns one line if --model names only a family, with no width, depth or config: which size that is, and
// the sizes that have names. Empty otherwise. `config`: the full one.
std::string unnamed_size(const ModelOptions& options, const nlohmann::json& config);

// Returns multiply-adds times two of one image's step, nothing recomputed. Backward is twice the forward, or
// once if the weights are frozen (an adapter's own products are few beside them).
double flops_of_image(const Training& training, const ImageExtent& image);
// Returns the extent of an image of the largest lane with the longest caption.
ImageExtent largest_extent(const DataShape& data);
// Returns multiply-adds times two of the step on the global batch. The captions of other ranks count as this
// rank's do.
double flops_of_step(const Training& training, const StepBatch& batch);

// Returns the file or folder with the tensors of --weights: of a folder of diffusers the file of the model.
// Throws Error as find_weights() does.
std::string path_of_tensors(const std::string& weights);
// Returns a digest of --weights, with "+" and that of the null rows of a folder of diffusers, which lie in a
// file of their own.
std::string digest_of_source(const std::string& weights);

// Throws Error if the weights of --weights do not fit the model, before a run has a folder. Names the
// autoencoder or the text encoder of the data if they are of a model for another one.
void check_first_weights(const TrainOptions& options, const DataShape& data,
                         const nlohmann::json& model_config);

// Builds everything. Weights are initialised or loaded as the options say, except on meta. The state is
// divided among `group`; a dry run makes a group of the ranks that it stands for. Throws Error.
Training build_training(const TrainOptions& options, const DataShape& data, at::Device device,
                        std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>());

}  // namespace kiln
