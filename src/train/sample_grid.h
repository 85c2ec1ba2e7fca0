// Sample grids that are drawn during training: RUN/samples/step-00001000.png.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "models/model_record.h"
#include "run/train_options.h"
#include "sample/prompts.h"
#include "sample/sampler_loop.h"
#include "train/dataset/training_data.h"
#include "train/setup.h"

namespace kiln {

struct SampleGrid {
  std::vector<uint8_t> png;
  int64_t height = 0, width = 0;
};

// What is needed to draw pictures during training.
struct GridSource {
  const ModelRecord& info;
  const Training& training;
  const Autoencoder* decoder;  // null: the model makes pixels
  const Prompts& prompts;      // in turn, for models that take captions
  at::Device device;
};

// Draws this rank's share of options.num_samples images, which is every world_size-th, as draw_sample_grid()
// does, and hands them to `sink`. Returns false if `stop` became true on a rank. A collective.
bool draw_share(const TrainOptions& options, const GridSource& source, const std::function<bool()>& stop,
                const ImageSink& sink);

// Draws options.num_samples images with the first EMA (without one: the weights), with the same noise every
// time. The model in training draws them: there is no second one, and divided weights are gathered segment by
// segment. Returns an empty grid if `stop` became true on a rank, and on ranks other than 0. A collective.
SampleGrid draw_sample_grid(const TrainOptions& options, const GridSource& source,
                            const std::function<bool()>& stop);

// Returns the captions of `count` samples spread over a store.
Prompts captions_of_samples(const TextStore& store, int64_t count, const ConditioningShape& shape);
// Returns what the grids of a run show: --sample-prompts, else captions of samples. `num_processes` is the
// number of processes on this machine, which share its memory. Throws Error: no text encoder for prompts, or
// another one than the captions'.
Prompts grid_prompts(const TrainOptions& options, const TrainingData& data, const ConditioningShape& shape,
                     at::Device device, at::ScalarType compute_dtype, int64_t num_processes);

// Writes RUN/samples/step-00001000.png; returns its path. REQUIRES: the grid is not empty. Throws Error.
std::string write_sample_grid(const std::string& run, int64_t step, const SampleGrid& grid);

// Returns the forward pass of `training`, for a sampler.
ForwardFn forward_of(const Training& training);

// Returns --cfg-scale if the model has an unconditional input, else 1.
double grid_cfg_scale(const TrainOptions& options, const ConditioningShape& shape);

// Returns the name of the grids' sampler.
std::string grid_sampler_name(const TrainOptions& options, const nlohmann::json& objective);
// Returns the config of the grids' sampler (make_sampler). `objective` is the objective's config.
nlohmann::json grid_sampler_config(const TrainOptions& options, const nlohmann::json& objective);

// Refuses, before a run begins, what cannot be drawn: latents without a decoder, classes out of range, a
// sampler that does not fit the objective, prompts for a model without captions. Throws Error naming the
// option.
void validate_sampling(const TrainOptions& options, const ModelRecord& info, bool has_decoder,
                       int64_t num_classes);

}  // namespace kiln
