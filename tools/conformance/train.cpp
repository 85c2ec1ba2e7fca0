// train: the training step on recorded batches, on as many ranks as the environment speaks of.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "core/error.h"
#include "data/batches.h"
#include "io.h"
#include "model_io.h"
#include "optimizer_config.h"
#include "parallel/joining.h"
#include "train/checkpoints.h"
#include "train/step.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct TrainVerbOptions {
  std::string model, model_config, weights, config, batches, outputs;
};

int64_t positive(const nlohmann::json& config, const std::string& key, int64_t default_value) {
  const int64_t value =
      config.contains(key) && !config.at(key).is_null() ? config.at(key).get<int64_t>() : default_value;
  if (value < 1) fail("train", "expected {} to be at least 1, got {}", key, value);
  return value;
}

// Micro-batches [N, B, ...] of a file as global batches of grad_accum * B rows.
class RecordedBatches {
 public:
  RecordedBatches(const std::string& path, const DenoiserShape& shape, const nlohmann::json& loss,
                  int64_t grad_accum)
      : inputs_(path), grad_accum_(grad_accum) {
    x_0_ = inputs_.get("x_start", {-1, -1, shape.in_channels, -1, -1});
    noise_ = inputs_.get("noise", x_0_.sizes());
    const int64_t num_micro = x_0_.size(0), micro_batch = x_0_.size(1);
    timesteps_ = read_timesteps(loss, num_micro, micro_batch);
    if (num_micro < 1 || micro_batch < 1 || num_micro % grad_accum != 0)
      fail("train",
           "expected a multiple of grad_accum ({}) micro-batches of at least 1 sample, got {} of {} in {}",
           grad_accum, num_micro, micro_batch, path);
    if (shape.num_classes > 0)
      labels_ = apply_label_drop(inputs_.get("y", {num_micro, micro_batch}), inputs_.get_if("drop"), shape);
  }

  int64_t num_steps() const { return x_0_.size(0) / grad_accum_; }
  int64_t micro_batch() const { return x_0_.size(1); }

  int64_t global_batch() const { return grad_accum_ * micro_batch(); }

  // This rank's rows of a step.
  StepBatch at(int64_t step, const ProcessGroup& group) const {
    const RowRange range = rank_rows(global_batch(), group.rank(), group.world_size());
    const auto rows = [&](const at::Tensor& recorded) {
      return recorded.defined() ? recorded.narrow(0, step * grad_accum_, grad_accum_)
                                      .flatten(0, 1)
                                      .narrow(0, range.first, range.count)
                                : recorded;
    };
    return {.x_0 = rows(x_0_),
            .noise = rows(noise_),
            .timesteps = rows(timesteps_),
            .class_labels = rows(labels_),
            .first_row = range.first,
            .global_batch = global_batch()};
  }

 private:
  at::Tensor read_timesteps(const nlohmann::json& loss, int64_t num_micro, int64_t micro_batch) const {
    const bool continuous =
        loss.value("type", "") == "flow" && loss.value("mode", "continuous") == "continuous";
    if (continuous) {
      const at::Tensor u = inputs_.get("u", {num_micro, micro_batch});
      return make_objective(loss)->timesteps(u.to(at::kDouble).flatten()).view({num_micro, micro_batch});
    }
    const at::Tensor t = inputs_.get("t", {num_micro, micro_batch}).to(at::kLong);
    const int64_t num_train_timesteps = loss.value("num_train_timesteps", int64_t{1000});
    if (t.numel() > 0 && (t.min().item<int64_t>() < 0 || t.max().item<int64_t>() >= num_train_timesteps))
      fail("train", "expected t in 0..{}, got {}..{} in {}", num_train_timesteps - 1, t.min().item<int64_t>(),
           t.max().item<int64_t>(), inputs_.path());
    return t;
  }

  Inputs inputs_;
  int64_t grad_accum_;
  at::Tensor x_0_, noise_, timesteps_, labels_;
};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void run_train(const TrainVerbOptions& options) {
  const nlohmann::json config = read_config(options.config);
  for (const char* key : {"loss", "optimizer"})
    if (!config.contains(key)) fail("train", "expected {} in {}", key, options.config);
  const auto denoiser = load_denoiser(options.model, read_config(options.model_config), options.weights);
  const auto objective = make_objective(config.at("loss"));
  const OptimizerConfig optimizer = parse_optimizer(config.at("optimizer"));
  const RecordedBatches batches(options.batches, denoiser->shape(), config.at("loss"),
                                positive(config, "grad_accum", 1));
  const bool clips = config.contains("grad_clip") && !config.at("grad_clip").is_null();
  const double max_grad_norm = clips ? config.at("grad_clip").get<double>() : optimizer.max_grad_norm;
  const double warmup = config.contains("lr_warmup_steps") && !config.at("lr_warmup_steps").is_null()
                            ? config.at("lr_warmup_steps").get<double>()
                            : 0;

  const std::shared_ptr<ProcessGroup> group = join_patiently();
  const int64_t ranks = group->world_size();
  TrainingState state(*denoiser, *optimizer.optimizer,
                      {.ema_decays = {config.value("ema_decay", 0.9999)},
                       .group = group,
                       .zero = {.stage = config.value("zero_stage", int64_t{0})}});
  TrainStep step(
      *denoiser, *objective, *optimizer.optimizer, state,
      {.micro_batch = (batches.micro_batch() + ranks - 1) / ranks, .max_grad_norm = max_grad_norm});
  std::map<std::string, std::vector<double>> series;
  for (int64_t s = 0; s < batches.num_steps(); ++s) {
    const double ramp = warmup > 0 ? std::min(1.0, static_cast<double>(s + 1) / warmup) : 1.0;
    const StepResult result = step.run(batches.at(s, *group), optimizer.lr * ramp);
    series["losses"].push_back(result.loss);
    series["grad_norms"].push_back(result.grad_norm);
    if (!result.mse.empty()) series["mse"].push_back(mean(result.mse));
    if (!result.vb.empty()) series["vb"].push_back(mean(result.vb));
  }

  Tensors outputs;
  for (const auto& [name, values] : series) outputs[name] = at::tensor(values, at::kDouble).to(at::kFloat);
  for (const auto& [prefix, kind] :
       {std::pair{"param.", WeightsKind::kMaster}, {"ema.", WeightsKind::kEma}}) {
    const auto trained = load_denoiser(options.model, read_config(options.model_config), options.weights);
    copy_weights(state, kind, 0, *trained);
    for (const auto& parameter : trained->parameters())
      if (parameter->trainable) outputs[prefix + parameter->key] = parameter->value.detach();
  }
  if (group->rank() == 0) write_outputs(options.outputs, outputs);
}

}  // namespace

void add_train_verb(CLI::App& app) {
  auto options = std::make_shared<TrainVerbOptions>();
  CLI::App* verb = app.add_subcommand("train", "Training steps on recorded batches");
  verb->add_option("--model", options->model, "Model name")->required();
  verb->add_option("--model-config", options->model_config, "JSON config of the model")->required();
  verb->add_option("--weights", options->weights, "Start weights")->required();
  verb->add_option("--config", options->config,
                   "JSON: loss, optimizer, ema_decay, grad_accum, grad_clip, ...")
      ->required();
  verb->add_option("--batches-file", options->batches,
                   "x_start, noise, t, y, drop with a leading micro-batch axis")
      ->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_train(*options); });
}

}  // namespace kiln::conformance
