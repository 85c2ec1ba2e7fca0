#include "train/setup.h"

#include <algorithm>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "data/batches.h"
#include "models/registry.h"
#include "parallel/host_memory.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

constexpr int64_t kSyntheticClasses = 1000;  // ImageNet's, as the published models have

// What a run begins with: fresh weights, or those of a file, one at a time. On meta they are not filled.
class FirstWeights {
 public:
  // `denoiser`: outlines. Throws Error: the file does not fit.
  FirstWeights(const TrainOptions& options, const Denoiser& denoiser, at::Device device)
      : seed_(options.seed), source_(options.weights), device_(device) {
    if (source_.empty() || device.is_meta()) return;
    loaded_ = load_tensors(source_);
    load_weights(denoiser, loaded_, source_);
  }

  at::Tensor operator()(const Parameter& parameter) const {
    const auto filled = std::make_shared<Parameter>(parameter);
    filled->value = at::empty(parameter.value.sizes(), at::TensorOptions(at::kFloat).device(device_));
    if (source_.empty())
      initialize_weights({filled}, seed_);
    else if (!device_.is_meta())
      load_weights({filled}, tensors_of(parameter.key), source_);
    return filled->value;
  }

 private:
  std::map<std::string, at::Tensor> tensors_of(const std::string& key) const {
    const auto found = loaded_.find(key);
    if (found == loaded_.end()) return {};
    return {*found};
  }

  uint64_t seed_;
  std::string source_;
  at::Device device_;
  std::map<std::string, at::Tensor> loaded_;
};

// Of the last rank.
int64_t most_rows(const TrainOptions& options, int64_t world_size) {
  return rank_rows(options.global_batch, world_size - 1, world_size).count;
}

at::ScalarType grad_dtype_of(const TrainOptions& options, at::ScalarType compute_dtype, int64_t world_size) {
  const bool accumulates = rows_of_walk(options, world_size) < most_rows(options, world_size);
  return accumulates || options.accumulate_f32 ? at::kFloat : compute_dtype;
}

}  // namespace

DataShape synthetic_shape(const TrainOptions& options) {
  const bool pixels = options.autoencoder == "pixels";
  const int64_t downsample = pixels ? 1 : 8;
  if (options.image_size % downsample != 0)
    fail("train", "--image-size must be a multiple of {}, got {}", downsample, options.image_size);
  const int64_t side = options.image_size / downsample;
  return {.channels = pixels ? 3 : 4,
          .height = side,
          .width = side,
          .num_classes = options.num_classes > 0 ? options.num_classes : kSyntheticClasses};
}

nlohmann::json denoiser_config_of(const TrainOptions& options, const DataShape& data,
                                  const Objective& objective) {
  nlohmann::json config = read_json_option("train", "--model-config", options.model_config);
  for (const auto& [key, value] : {std::pair{"hidden_size", options.hidden_size},
                                   {"depth", options.depth},
                                   {"num_heads", options.num_heads},
                                   {"patch_size", options.patch_size}})
    if (value > 0) config[key] = value;
  config["input_size"] = data.height;
  config["in_channels"] = data.channels;
  config["num_classes"] = data.num_classes;
  config["class_dropout_prob"] = data.num_classes > 0 ? options.class_dropout_prob : 0.0;
  config["learn_sigma"] = objective.learns_sigma();
  return resolve_denoiser_config(options.model, config);
}

ZeroOptions zero_options_of(const TrainOptions& options, int64_t world_size) {
  if (options.global_batch < world_size)
    fail("train", "--global-batch {} is less than one image for each of {} ranks: give at least {}",
         options.global_batch, world_size, world_size);
  ZeroOptions zero{.stage = options.zero_stage,
                   .persist_threshold = options.persist_threshold,
                   .shard_within_node = options.shard_within_node,
                   .prefetch_segments = options.prefetch_segments,
                   .reduce_bucket_size = options.reduce_bucket_size};
  if (!options.reduce_dtype.empty()) zero.reduce_dtype = parse_compute_dtype(options.reduce_dtype);
  return zero;
}

int64_t rows_of_walk(const TrainOptions& options, int64_t world_size) {
  const int64_t most = most_rows(options, world_size);
  return options.micro_batch > 0 ? std::min(options.micro_batch, most) : most;
}

int64_t rows_of_validation(const TrainOptions& options, int64_t world_size) {
  const int64_t rows = rows_of_walk(options, world_size), images = options.validation_images;
  return images > 0 ? std::min(rows, (images + world_size - 1) / world_size) : rows;
}

Training build_training(const TrainOptions& options, const DataShape& data, at::Device device,
                        std::shared_ptr<ProcessGroup> group) {
  const at::ScalarType compute_dtype = parse_compute_dtype(options.compute_dtype);
  Training training{.objective = make_objective(objective_config_of(options)),
                    .optimizer = make_optimizer(optimizer_config_of(options))};
  training.model_config = denoiser_config_of(options, data, *training.objective);
  training.denoiser =
      build_denoiser(options.model, training.model_config, {.compute_dtype = compute_dtype, .outline = true});
  const std::vector<MemoryChoice> memory = parse_memory_choices(options, *training.denoiser);
  const FirstWeights first_weights(options, *training.denoiser, device);
  training.state = std::make_unique<TrainingState>(
      *training.denoiser, *training.optimizer,
      TrainingStateOptions{.device = device,
                           .compute_dtype = compute_dtype,
                           .grad_dtype = grad_dtype_of(options, compute_dtype, group->world_size()),
                           .ema_decays = options.ema_decay,
                           .loss_scaler = loss_scaler_options_of(options),
                           .group = group,
                           .zero = zero_options_of(options, group->world_size()),
                           .placement = placement_of(options.offload_optimizer, has_host_behind(device)),
                           .weight_placement = placement_of(options.offload_params, has_host_behind(device)),
                           .nvme = {.folder = options.nvme_path,
                                    .queue_depth = options.nvme_queue_depth,
                                    .block_bytes = options.nvme_block_size},
                           .first_value = first_weights});
  training.step = std::make_unique<TrainStep>(*training.denoiser, *training.objective, *training.optimizer,
                                              *training.state,
                                              StepOptions{.device = device,
                                                          .micro_batch = options.micro_batch,
                                                          .max_grad_norm = options.max_grad_norm,
                                                          .ema_schedule = options.ema_schedule,
                                                          .memory = memory});
  return training;
}

}  // namespace kiln
