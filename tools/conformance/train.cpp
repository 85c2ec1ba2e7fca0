// train: the training step on recorded batches, on as many ranks as the environment speaks of.

#include <algorithm>
#include <memory>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "data/loader/batches.h"
#include "diffusion/alignment.h"
#include "io.h"
#include "model_io.h"
#include "models/lora.h"
#include "models/weights.h"
#include "objective_io.h"
#include "optimizer_config.h"
#include "parallel/ranks/agreement.h"
#include "step/step.h"
#include "train/checkpoints.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct TrainVerbOptions {
  std::string model, model_config, weights, adapter, head, config, batches, outputs;
};

struct TrainVerbConfig {
  RecordedObjective loss;
  OptimizerConfig optimizer;
  double ema_decay = 0.9999, max_grad_norm = 0, align_weight = 0;
  int64_t grad_accum = 1, lr_warmup_steps = 0, zero_stage = 0;
};

TrainVerbConfig parse_train(const nlohmann::json& json) {
  const JsonConfig config("train", json);
  for (const char* key : {"loss", "optimizer"})
    if (!config.has(key)) fail("train", "expected {} in the config", key);
  TrainVerbConfig parsed{.loss = parse_objective(config.object("loss")),
                         .optimizer = parse_optimizer(config.object("optimizer"))};
  parsed.ema_decay = config.get("ema_decay", parsed.ema_decay);
  parsed.max_grad_norm = config.has("grad_clip") ? max_grad_norm_of(config) : parsed.optimizer.max_grad_norm;
  parsed.grad_accum = config.positive("grad_accum", parsed.grad_accum);
  parsed.align_weight = config.get("align_weight", parsed.align_weight);
  parsed.lr_warmup_steps = config.get("lr_warmup_steps", parsed.lr_warmup_steps);
  parsed.zero_stage = config.get("zero_stage", parsed.zero_stage);
  if (!(parsed.ema_decay >= 0 && parsed.ema_decay <= 1))
    fail("train", "expected ema_decay in [0, 1], got {}", parsed.ema_decay);
  if (parsed.lr_warmup_steps < 0)
    fail("train", "expected lr_warmup_steps of 0 or more, got {}", parsed.lr_warmup_steps);
  return parsed;
}

// Micro-batches [N, B, ...] of a file as global batches of grad_accum * B rows.
class RecordedBatches {
 public:
  RecordedBatches(const std::string& path, const DenoiserShape& shape, const RecordedObjective& loss,
                  int64_t grad_accum)
      : inputs_(path), grad_accum_(grad_accum), has_halo_(loss.objective->compares_samples()) {
    x_0_ = inputs_.get("x_start", {-1, -1, shape.in_channels, -1, -1});
    noise_ = inputs_.get("noise", x_0_.sizes());
    if (inputs_.has("input_noise")) input_noise_ = inputs_.get("input_noise", x_0_.sizes());
    const int64_t num_micro = x_0_.size(0), micro_batch = x_0_.size(1);
    if (num_micro < 1 || micro_batch < 1 || num_micro % grad_accum != 0)
      fail("train",
           "expected a multiple of grad_accum ({}) micro-batches of at least 1 sample, got {} of {} in {}",
           grad_accum, num_micro, micro_batch, path);
    timesteps_ = loss.timesteps(inputs_, {num_micro, micro_batch});
    conditioning_ = read_conditioning(inputs_, {num_micro, micro_batch}, shape);
  }

  int64_t num_steps() const { return x_0_.size(0) / grad_accum_; }
  int64_t micro_batch() const { return x_0_.size(1); }

  int64_t global_batch() const { return grad_accum_ * micro_batch(); }

  // This rank's rows of a step.
  StepBatch at(int64_t step, const ProcessGroup& group) const {
    const RowRange range = rank_rows(global_batch(), group.rank(), group.world_size());
    const auto some = [&](const at::Tensor& recorded, int64_t first, int64_t count) {
      return recorded.narrow(0, step * grad_accum_, grad_accum_).flatten(0, 1).narrow(0, first, count);
    };
    const auto rows = [&](const at::Tensor& recorded) {
      return recorded.defined() ? some(recorded, range.first, range.count) : recorded;
    };
    const auto row_before = [&](const at::Tensor& recorded) {
      const int64_t row = (range.first + global_batch() - 1) % global_batch();
      return has_halo_ ? some(recorded, row, 1) : at::Tensor();
    };
    return {.x_0 = rows(x_0_),
            .noise = rows(noise_),
            .timesteps = rows(timesteps_),
            .input_noise = rows(input_noise_),
            .halo_x_0 = row_before(x_0_),
            .halo_noise = row_before(noise_),
            .halo_timesteps = row_before(timesteps_),
            .conditioning = slice_rows(conditioning_, step * global_batch() + range.first, range.count),
            .first_row = range.first,
            .global_batch = global_batch()};
  }

 private:
  Inputs inputs_;
  int64_t grad_accum_;
  bool has_halo_;
  at::Tensor x_0_, noise_, input_noise_, timesteps_;
  Conditioning conditioning_;
};

// The model, with the adapter that is trained in its place.
LoadedDenoiser load_trained(const TrainVerbOptions& options) {
  LoadedDenoiser loaded = load_denoiser(options.model, options.model_config, options.weights);
  if (!options.adapter.empty()) attach_lora(*loaded.denoiser, read_peft_lora(options.adapter));
  return loaded;
}

// Adds the weighted alignment to the loss. Its head begins with the weights of the file.
void add_alignment(std::unique_ptr<Objective>& objective, double weight, const Denoiser& denoiser,
                   const std::string& file) {
  if ((weight > 0) != !file.empty())
    fail("train", "expected align_weight in the config together with --head");
  if (file.empty()) return;
  objective = with_alignment(std::move(objective), weight, denoiser, {});
  load_weights(objective->head()->parameters(), load_tensors(file), file);
}

void run_train(const TrainVerbOptions& options) {
  TrainVerbConfig config = parse_config(options.config, parse_train);
  const auto denoiser = load_trained(options).denoiser;
  add_alignment(config.loss.objective, config.align_weight, *denoiser, options.head);
  const Optimizer& optimizer = *config.optimizer.optimizer;
  const RecordedBatches batches(options.batches, denoiser->shape(), config.loss, config.grad_accum);

  const std::shared_ptr<ProcessGroup> group = join_patiently(/*build=*/"");
  const int64_t ranks = group->world_size();
  TrainingState state(*denoiser, optimizer,
                      {.ema_decays = {config.ema_decay},
                       .group = group,
                       .zero = {.stage = config.zero_stage},
                       .head = config.loss.objective->head()});
  TrainStep step(
      *denoiser, *config.loss.objective, optimizer, state,
      {.micro_batch = (batches.micro_batch() + ranks - 1) / ranks, .max_grad_norm = config.max_grad_norm});
  const std::vector<std::string> terms = config.loss.objective->term_names();
  std::map<std::string, std::vector<double>> series;
  for (int64_t s = 0; s < batches.num_steps(); ++s) {
    const double warmup = static_cast<double>(std::max<int64_t>(config.lr_warmup_steps, 1));
    const double ramp = std::min(1.0, static_cast<double>(s + 1) / warmup);
    const StepResult result = step.run(batches.at(s, *group), config.optimizer.lr * ramp);
    series["losses"].push_back(result.loss);
    series["grad_norms"].push_back(result.grad_norm);
    for (size_t i = 0; i < terms.size(); ++i) series[terms[i]].push_back(result.terms.at(i));
  }

  Tensors outputs;
  for (const auto& [name, values] : series) outputs[name] = at::tensor(values, at::kDouble).to(at::kFloat);
  for (const auto& [prefix, kind] :
       {std::pair{"param.", WeightsKind::kMaster}, {"ema.", WeightsKind::kEma}}) {
    const LoadedDenoiser trained = load_trained(options);
    copy_weights(state, kind, 0, *trained.denoiser);
    Tensors weights;
    for (const auto& parameter : trained.denoiser->parameters())
      if (parameter->trainable) weights[parameter->key] = parameter->value.detach();
    for (const auto& [key, weight] : trained.in_file_keys(weights)) outputs[prefix + key] = weight;
  }
  if (const auto head = state.head()) {
    const FlatUnit& unit = state.segments[*head].unit;
    const at::Tensor whole = state.zero->whole(*head, unit.master);
    for (size_t i = 0; i < unit.layout().slots.size(); ++i)
      outputs["head." + unit.layout().slots[i].key] = unit.view(whole, i).clone();
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
  verb->add_option("--adapter", options->adapter, "LoRA in PEFT's format, which is trained instead");
  verb->add_option("--head", options->head, "Start weights of the projector of align_weight");
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
