#include "kiln/step.h"

#include <algorithm>
#include <span>

#include "checkpoint/tensor_files.h"
#include "data/loader/batch_draws.h"
#include "library/guarded.h"
#include "models/model_record.h"
#include "models/registry.h"
#include "optim/lr_schedule.h"
#include "parallel/machine.h"
#include "train/checkpoints.h"
#include "train/setup.h"

namespace kiln::v0 {

struct Trainer::Impl {
  TrainOptions options;
  DataShape data{};
  Training training{};
  BatchOptions draws{};
  int64_t steps = 0;
};

namespace {

TrainOptions options_without_files(const Options& given) {
  TrainOptions options = train_options_of(given);
  options.data.path = "synthetic";
  options.out = "none";  // nothing is written there; validation wants a name
  validate(options);
  return options;
}

void check_size(const char* what, size_t expected, size_t got) {
  if (got != expected) throw Error(fmt::format("a batch needs {} values of {}, got {}", expected, what, got));
}

template <class Values>
void take(const char* what, const Values& given, Values& taken) {
  if (given.empty()) return;
  check_size(what, taken.size(), given.size());
  taken = given;
}

void check_labels(const std::vector<int64_t>& labels, const ConditioningShape& takes) {
  const int64_t most = takes.num_classes - (takes.has_null_class ? 0 : 1);
  for (const int64_t label : labels)
    if (label < 0 || label > most)
      throw Error(fmt::format("a batch needs class_labels from 0 to {}, got {}", most, label));
}

void check_times(const std::vector<double>& times) {
  for (const double time : times)
    if (!(time >= 0 && time < 1))
      throw Error(fmt::format("a batch needs times from 0 to below 1, got {}", time));
}

// Fills the loader's batch with the given values and draws what they leave open.
kiln::Batch drawn(const Batch& given, const BatchOptions& draws, const DataShape& data, int64_t position) {
  kiln::Batch batch;
  shape_batch(draws, position, data, data.lanes.front(), batch);
  check_size("x_0", batch.x_0.size(), given.x_0.size());
  check_size("class_labels", batch.class_labels.size(), given.class_labels.size());
  if (!given.noise.empty() && !batch.input_noise.empty())
    throw Error(
        "input-perturbation adds to noise that is drawn: leave noise out of the batch, or the option");
  batch.x_0 = given.x_0;
  batch.class_labels = given.class_labels;
  const auto elements = static_cast<size_t>(batch.shape.sample_elements());
  for (int64_t row = 0; row < batch.size_with_halo(); ++row)
    draw_common(draws, row, std::span(batch.noise).subspan(static_cast<size_t>(row) * elements, elements),
                batch);
  take("noise", given.noise, batch.noise);
  take("times", given.times, batch.time_uniform);
  check_times(given.times);
  return batch;
}

}  // namespace

Trainer::Trainer(const Options& given) {
  guarded([&] {
    impl_ = std::make_unique<Impl>(Impl{.options = options_without_files(given)});
    Impl& all = *impl_;
    if (all.options.objective.contrastive_weight > 0)
      fail("train", "contrastive-weight compares samples in the loader's order: leave it out");
    if (all.options.lora.is_on())
      fail("train",
           "lora-rank and lora-weights train an adapter, which has no file here yet: leave them out");
    if (all.options.memory.budget.is_given())
      fail("train", "memory-budget is for kiln train: give recompute or offload-activations");
    const at::Device device = choose_device(all.options.compute.device);
    apply({.device = device,
           .threads = all.options.compute.threads,
           .tf32 = all.options.compute.tf32,
           .deterministic = all.options.compute.deterministic});
    all.data = synthetic_shape(all.options);
    if (all.data.text.width > 0)
      fail("train", "{} takes captions, which batches of your own cannot have yet", all.options.model.name);
    all.training = build_training(all.options, all.data, device);
    const ConditioningShape& takes = all.training.denoiser->shape().conditioning;
    all.draws = batch_options_of(all.options);
    all.draws.class_dropout_prob = takes.has_null_class ? all.options.model.class_dropout_prob : 0;
    all.draws.null_class = takes.num_classes;
  });
}

Trainer::~Trainer() = default;

Trainer::Shape Trainer::shape() const {
  const Lane& lane = impl_->data.lanes.front();
  return {.rows = impl_->options.global_batch,
          .channels = impl_->data.channels,
          .height = lane.height,
          .width = lane.width,
          .num_classes = impl_->data.num_classes};
}

StepResult Trainer::step(const Batch& given) {
  return guarded([&] {
    Impl& all = *impl_;
    const kiln::Batch batch = drawn(given, all.draws, all.data, all.steps * all.options.global_batch);
    check_labels(given.class_labels, all.training.denoiser->shape().conditioning);
    const double share = static_cast<double>(all.steps) / static_cast<double>(all.options.max_steps);
    const double lr = lr_at(all.options.lr, all.steps, std::min(share, 1.0));
    const kiln::StepResult done = all.training.step->run(as_tensors(batch, *all.training.objective), lr);
    return StepResult{.step = ++all.steps,
                      .loss = done.loss,
                      .grad_norm = done.grad_norm,
                      .lr = lr,
                      .applied = done.applied};
  });
}

void Trainer::train(BatchSource& source, int64_t steps,
                    const std::function<void(const StepResult&)>& report) {
  for (int64_t i = 0; i < steps; ++i) {
    const StepResult done = step(source.next());
    if (report) report(done);
  }
}

void Trainer::save_weights(const std::string& path, bool average) const {
  guarded([&] {
    const Impl& all = *impl_;
    const auto denoiser = build_denoiser(all.options.model.name, all.training.model_config);
    const bool has_average = average && !all.training.state->ema_decays.empty();
    copy_weights(*all.training.state, has_average ? WeightsKind::kEma : WeightsKind::kMaster, 0, *denoiser);
    std::map<std::string, at::Tensor> weights;
    for (const auto& parameter : denoiser->parameters()) weights[parameter->key] = parameter->value.detach();
    const ModelRecord record{.model = all.options.model.name,
                             .model_config = all.training.model_config,
                             .objective = objective_config_of(all.options.objective),
                             .image_size = all.options.data.image_size};
    save_tensors(path, weights, metadata_of(record));
  });
}

}  // namespace kiln::v0
