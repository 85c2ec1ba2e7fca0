#include "train/training_run.h"

#include <ATen/Parallel.h>

#include <utility>

#include "checkpoint/weights_file.h"
#include "core/atomic_file.h"
#include "core/tensors.h"
#include "parallel/agreement.h"
#include "parallel/cpu_share.h"
#include "parallel/joining.h"
#include "parallel/machine.h"
#include "train/run_checks.h"
#include "train/sample_grid.h"

namespace kiln {

TrainingRun::TrainingRun(const TrainOptions& given, std::shared_ptr<ProcessGroup> ranks)
    : options(given),
      group(std::move(ranks)),
      device(parse_device(options.device, group->ranks().local_rank)),
      compute_dtype(parse_compute_dtype(options.compute_dtype)),
      phase_memory(device) {
  apply(ComputeSettings{.device = device,
                        .threads = options.threads,
                        .cpu_share = cpu_share(*group),
                        .tf32 = options.tf32,
                        .deterministic = options.deterministic});
  for (const std::string& line : settings_without_effect(options, device, group->world_size())) warn(line);
  data = open_training_data(options, device, compute_dtype);
  const nlohmann::json objective = objective_config_of(options);
  info = {.model = options.model,
          .model_config = denoiser_config_of(options, data.shape, *make_objective(objective)),
          .objective = objective,
          .image_size = options.image_size,
          .autoencoder = data.autoencoder,
          .class_names = data.class_names,
          .ema_decays = options.ema_decay};
  validate_sampling(options, info, data.decoder != nullptr, data.shape.num_classes);
  if (!options.validation_data.empty()) validation.emplace(options, data, device);
  config = {{"options", to_json(options)}, {"data", data.identity}};
}

void TrainingRun::warn(const std::string& text) const {
  if (is_first()) fmt::print(stderr, "warning: {}\n", text);
}

void TrainingRun::check_same_on_all_ranks() const {
  const std::string validation_identity = validation ? validation->identity() : "";
  require_same_on_all_ranks(*group, {{"the content of --data", data.identity},
                                     {"the content of --validation-data", validation_identity},
                                     {"the content of --weights", weights_identity()}});
  if (validation && validation_identity == data.identity)
    warn(
        "--validation-data holds the samples of --data: its loss tells nothing that the training's does not");
}

// Empty: there are none, or nobody to compare them with.
std::string TrainingRun::weights_identity() const {
  std::string digest;
  if (!options.weights.empty() && !is_alone())
    agree(*group, "--weights", [&] { digest = digest_of_weights(options.weights); });
  return digest;
}

void TrainingRun::build() {
  // On every rank at once: beside the others is how each of them computes. Before there is state, which may
  // leave no room.
  peak_flops =
      options.peak_tflops > 0 ? options.peak_tflops * 1e12 : measure_peak_flops(device, compute_dtype);
  {
    const PhaseMemory::Phase phase(phase_memory, "load");
    training = build_training(options, data.shape, device, group);
  }
  if (training.state->nvme)
    for (const std::string& note : training.state->nvme->store()->notes()) warn(note);
  const DenoiserShape& shape = training.denoiser->shape();
  batches = data.batches({.seed = options.seed,
                          .global_batch = options.global_batch,
                          .rank = group->rank(),
                          .world_size = group->world_size(),
                          .class_dropout_prob = shape.has_null_class ? options.class_dropout_prob : 0,
                          .null_class = shape.num_classes,
                          .draw_posterior = options.draw_posterior,
                          .flip = options.flip,
                          .num_threads = static_cast<int>(options.loader_threads),
                          .prefetch = options.prefetch});
}

void TrainingRun::write_description() const {
  if (!is_first()) return;
  write_run_info(options.out, info);
  write_file_atomically("train", options.out + "/config.toml", to_toml(options));
}

void TrainingRun::print_description() const {
  if (!is_first()) return;
  int64_t num_weights = 0;
  for (const auto& segment : training.state->segments)
    for (const FlatSlot& slot : segment.unit.layout().slots) num_weights += slot.numel;
  fmt::print("{}: {:.1f} M weights, {} x {} x {} latents, {} classes, {}, {} on {} with {} threads\n",
             info.model, static_cast<double>(num_weights) / 1e6, data.shape.channels, data.shape.height,
             data.shape.width, data.shape.num_classes, options.objective, options.compute_dtype,
             machine_name(device), at::get_num_threads());
  if (!is_alone())
    fmt::print("{} ranks, {} on this machine, ZeRO stage {}\n", group->world_size(),
               group->ranks().local_world_size, options.zero_stage);
  const int64_t num_samples = batches->num_samples();
  if (num_samples == 0) return;  // endless
  const double epoch_steps = static_cast<double>(num_samples) / static_cast<double>(options.global_batch);
  fmt::print("{} samples: {:.1f} steps an epoch, {:.1f} epochs in {} steps\n", num_samples, epoch_steps,
             static_cast<double>(options.max_steps) / epoch_steps, options.max_steps);
}

}  // namespace kiln
