// The order of things: data and model are checked against each other, the newest checkpoint is found, then
// batches are stepped, logged, sampled and saved until the run is done.
#include "train/loop.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "core/stop_signal.h"
#include "core/tensors.h"
#include "models/registry.h"
#include "optim/lr_schedule.h"
#include "parallel/machine.h"
#include "parallel/ranks.h"
#include "train/checkpoints.h"
#include "train/monitor.h"
#include "train/observer_group.h"
#include "train/profiler.h"
#include "train/report.h"
#include "train/sample_grid.h"
#include "train/step.h"
#include "train/step_measurement.h"
#include "train/training_data.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kComparedSteps = 100;  // after which the plan is compared for the first time

void warn(const std::string& text) { fmt::print(stderr, "warning: {}\n", text); }

class Run {
 public:
  Run(const TrainOptions& options, const RunContext& context);
  void train();

 private:
  void describe() const;
  void watch();
  void build();
  void resume_or_start();
  void check_resumable(const TrainStateInfo& saved) const;
  void train_step();
  void handle_bad_step(const Batch& batch, const StepBatch& tensors, const StepResult& result);
  void compare_with_plan();
  void checkpoint();
  void sample();
  double train_seconds() const;
  double progress() const;
  bool finished() const;
  double max_seconds() const { return options_.max_minutes * 60; }

  TrainOptions options_;
  RunContext context_;
  StopSignal stop_;
  at::Device device_;
  at::ScalarType compute_dtype_;
  LrSchedule lr_schedule_;
  TrainingData data_;
  RunInfo info_;
  nlohmann::json config_;  // options and data identity, as checkpoints keep them
  Training training_;
  std::unique_ptr<BatchSource> batches_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;
  std::unique_ptr<StepProfiler> profiler_;
  std::unique_ptr<StepMeasurement> measurement_;
  double peak_flops_ = 0;

  int64_t step_ = 0, bad_steps_ = 0, last_saved_ = -1;
  double earlier_seconds_ = 0;  // of training in earlier processes
  Clock::time_point begin_{};
};

Run::Run(const TrainOptions& options, const RunContext& context)
    : options_(options),
      context_(context),
      device_(parse_device(options.device)),
      compute_dtype_(parse_compute_dtype(options.compute_dtype)),
      lr_schedule_{.name = options.lr_schedule,
                   .lr = options.lr,
                   .warmup_steps = options.lr_warmup_steps,
                   .min_lr_ratio = options.min_lr_ratio} {
  apply(ComputeSettings{.device = device_,
                        .threads = options.threads,
                        .tf32 = options.tf32,
                        .deterministic = options.deterministic});
  if (options.tf32 && device_.is_cpu()) warn("--tf32 has no effect on a CPU");
  data_ = open_training_data(options, device_, compute_dtype_);
  info_ = {
      .model = options.model,
      .model_config = denoiser_config_of(options, data_.shape, *make_objective(objective_config_of(options))),
      .objective = objective_config_of(options),
      .image_size = options.image_size,
      .autoencoder = data_.autoencoder,
      .class_names = data_.class_names,
      .ema_decays = options.ema_decay};
  validate_sampling(options, info_, data_.decoder != nullptr, data_.shape.num_classes);
  config_ = {{"options", to_json(options)}, {"data", data_.identity}};
}

void Run::build() {
  training_ = build_training(options_, data_.shape, device_);
  const DenoiserShape& shape = training_.denoiser->shape();
  batches_ = data_.batches({.seed = options_.seed,
                            .global_batch = options_.global_batch,
                            .class_dropout_prob = shape.has_null_class ? options_.class_dropout_prob : 0,
                            .null_class = shape.num_classes,
                            .draw_posterior = options_.draw_posterior,
                            .flip = options_.flip,
                            .num_threads = static_cast<int>(options_.loader_threads),
                            .prefetch = options_.prefetch});
}

// Everything that watches the step.
void Run::watch() {
  training_.step->observe(&observers_);
  observers_.add(&monitor_->timers());
  measurement_ =
      std::make_unique<StepMeasurement>(device_, options_.global_batch, *training_.state, observers_);
  if (options_.profile.empty()) return;
  const StepRange steps = parse_profile(options_.profile);
  StepProfiler::Options profile{
      .steps = steps,
      .path = fmt::format("{}/profile-{}-{}.json", options_.out, steps.first, steps.last),
      .device = device_,
      .segments = {}};
  for (const auto& segment : training_.denoiser->segments()) profile.segments.push_back(segment->name());
  profiler_ = std::make_unique<StepProfiler>(std::move(profile));
  observers_.add(profiler_.get());
}

void Run::describe() const {
  int64_t num_weights = 0;
  for (const auto& segment : training_.state->segments)
    for (const FlatSlot& slot : segment.unit.layout().slots) num_weights += slot.numel;
  fmt::print("{}: {:.1f} M weights, {} x {} x {} latents, {} classes, {}, {} on {} with {} threads\n",
             info_.model, static_cast<double>(num_weights) / 1e6, data_.shape.channels, data_.shape.height,
             data_.shape.width, data_.shape.num_classes, options_.objective, options_.compute_dtype,
             machine_name(device_), at::get_num_threads());
}

void Run::check_resumable(const TrainStateInfo& saved) const {
  const OptionChanges changes = compare_options(saved.config.at("options"), config_.at("options"));
  if (!changes.refused.empty())
    fail("resume", "{} holds a run with other settings: {}; give the same ones, or another --out",
         options_.out, fmt::join(changes.refused, ", "));
  if (saved.config.at("data") != config_.at("data"))
    fail("resume",
         "{} was trained on other data ({}) than --data {} ({}): give the same store, or another --out",
         options_.out, saved.config.at("data").get<std::string>(), options_.data, data_.identity);
  if (!changes.warned.empty())
    warn(fmt::format("resuming with {}: further bits differ from those of an uninterrupted run",
                     fmt::join(changes.warned, ", ")));
  for (const char* end : {"max-steps", "max-minutes"})
    if (options_.lr_schedule == "cosine" &&
        saved.config.at("options").at(end) != config_.at("options").at(end))
      warn(fmt::format("--{} {} instead of {} moves the end of the cosine: the learning rate jumps here", end,
                       config_.at("options").at(end).dump(), saved.config.at("options").at(end).dump()));
  if (saved.machine != machine_name(device_) || saved.num_threads != at::get_num_threads())
    warn(fmt::format(
        "resuming on {} with {} threads what {} with {} threads began: further bits differ from those of "
        "an uninterrupted run",
        machine_name(device_), at::get_num_threads(), saved.machine, saved.num_threads));
}

void Run::resume_or_start() {
  const std::vector<Checkpoint> checkpoints = list_checkpoints(options_.out);
  TrainStateInfo saved;
  if (!checkpoints.empty()) {
    saved = read_train_state(checkpoints.back().folder);
    check_resumable(saved);
  }
  std::error_code error;
  fs::create_directories(fs::path(options_.out) / "checkpoints", error);
  if (error) fail("train", "cannot create --out {}: {}", options_.out, error.message());
  prune_checkpoints(options_.out, /*keep=*/0);
  build();
  if (!checkpoints.empty()) {
    load_checkpoint(checkpoints.back().folder, *training_.state, *training_.optimizer);
    step_ = last_saved_ = saved.step;
    bad_steps_ = saved.bad_steps;
    earlier_seconds_ = saved.train_seconds;
    batches_->seek(saved.images_seen);
  }
  write_run_info(options_.out, info_);
  write_file_atomically("train", options_.out + "/config.toml", to_toml(options_));
  peak_flops_ =
      options_.peak_tflops > 0 ? options_.peak_tflops * 1e12 : measure_peak_flops(device_, compute_dtype_);
  monitor_ = std::make_unique<Monitor>(
      MonitorOptions{
          .run = options_.out,
          .global_batch = options_.global_batch,
          .max_steps = options_.max_steps,
          .log_every = options_.log_every,
          .max_seconds = max_seconds(),
          .flops_per_image = 3 * training_.denoiser->shape().forward_flops,  // backward is twice the forward
          .peak_flops = peak_flops_,
          .device = device_,
          .tensorboard = options_.tensorboard},
      step_);
  if (checkpoints.empty()) return;
  monitor_->restore_window(saved.log_window);
  monitor_->event({{"event", "resume"}, {"step", step_}});
  fmt::print("resuming {} from step {} ({} images seen)\n", options_.out, step_, saved.images_seen);
}

double Run::train_seconds() const {
  return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - begin_).count();
}

double Run::progress() const {
  const double by_steps = static_cast<double>(step_) / static_cast<double>(options_.max_steps);
  return max_seconds() > 0 ? std::max(by_steps, train_seconds() / max_seconds()) : by_steps;
}

bool Run::finished() const {
  return step_ >= options_.max_steps || (max_seconds() > 0 && train_seconds() >= max_seconds());
}

void Run::train() {
  resume_or_start();
  watch();
  describe();
  begin_ = Clock::now();
  while (!finished() && !stop_.requested()) {
    train_step();
    if (measurement_->num_steps() == kComparedSteps) {
      compare_with_plan();
      if (context_.save) write_report(options_.out);
    }
    if (options_.sample_every > 0 && step_ % options_.sample_every == 0) sample();
    if (options_.checkpoint_every > 0 && step_ % options_.checkpoint_every == 0) checkpoint();
  }
  if (profiler_) profiler_->finish();
  if (context_.save && last_saved_ != step_) checkpoint();
  compare_with_plan();
  if (context_.save) write_report(options_.out);
  fmt::print("{} after step {} ({} images): {}\n", stop_.requested() ? "stopped by a signal" : "finished",
             step_, step_ * options_.global_batch, options_.out);
}

void Run::train_step() {
  measurement_->begin_step();
  const int64_t batches_ready = batches_->ready();
  const std::shared_ptr<const Batch> batch = batches_->next();
  const StepBatch tensors = as_tensors(*batch, *training_.objective);
  const double lr = lr_at(lr_schedule_, step_, progress());
  ++step_;
  if (profiler_) profiler_->begin_step(step_);
  measurement_->begin_run();
  const StepResult result = training_.step->run(tensors, lr);
  monitor_->timers().end_step();
  measurement_->end_run();
  if (profiler_) profiler_->end_step(step_);
  const double stall_seconds = batches_->take_stall_seconds();
  const at::Tensor positions = training_.objective->position(tensors.timesteps).to(at::kDouble).contiguous();
  monitor_->step(
      {.step = step_,
       .images_seen = step_ * options_.global_batch,
       .lr = lr,
       .train_seconds = train_seconds(),
       .stall_seconds = stall_seconds,
       .batches_ready = batches_ready,
       .result = &result,
       .positions = {positions.data_ptr<double>(), positions.data_ptr<double>() + positions.numel()}});
  if (result.applied)
    bad_steps_ = 0;
  else
    handle_bad_step(*batch, tensors, result);
  measurement_->end_step(stall_seconds);
}

// RUN/plan.json: what the plan said beside what was measured so far.
void Run::compare_with_plan() {
  if (measurement_->num_steps() == 0) return;
  const nlohmann::json comparison = comparison_json(context_.predicted, measurement_->figures());
  write_file_atomically("plan", options_.out + "/plan.json", comparison.dump(1) + "\n");
  if (!context_.save) return;
  for (const auto& finding : comparison.at("findings")) fmt::print("plan: {}\n", finding.get<std::string>());
}

// Nothing has moved. A gradient that only overflowed fp16 costs a step, no more: the loss scale has shrunk.
void Run::handle_bad_step(const Batch& batch, const StepBatch& tensors, const StepResult& result) {
  if (std::isfinite(result.loss) && result.loss_scale > training_.state->loss_scaler.scale()) {
    monitor_->event(
        {{"event", "loss_scale"}, {"step", step_}, {"loss_scale", training_.state->loss_scaler.scale()}});
    return;
  }
  const bool by_loss = !std::isfinite(result.loss);
  constexpr size_t kMostNamed = 8;
  std::vector<std::string> named;
  nlohmann::json event = {{"event", "skipped"},
                          {"step", step_},
                          {"cause", by_loss ? "loss" : "gradient"},
                          {"sample_ids", nlohmann::json::array()},
                          {"timesteps", nlohmann::json::array()}};
  for (size_t i = 0; i < result.losses.size(); ++i) {
    if (by_loss && std::isfinite(result.losses[i])) continue;
    const double t = tensors.timesteps[static_cast<int64_t>(i)].item<double>();
    event["sample_ids"].push_back(batch.sample_ids[i]);
    event["timesteps"].push_back(t);
    if (named.size() < kMostNamed)
      named.push_back(
          fmt::format("{} ({}) at t {:g}", batch.sample_ids[i], data_.sample_name(batch.sample_ids[i]), t));
  }
  const size_t more = event["sample_ids"].size() - named.size();
  warn(fmt::format("step {} skipped, {} is not finite: samples {}{}", step_, by_loss ? "loss" : "gradient",
                   fmt::join(named, ", "), more > 0 ? fmt::format(" and {} more", more) : ""));
  monitor_->event(event);
  if (++bad_steps_ <= options_.max_bad_steps) return;
  const std::vector<Checkpoint> saved = list_checkpoints(options_.out);
  fail("train", "{} steps in a row were not finite, the last is {} (--max-bad-steps {}): {}", bad_steps_,
       step_, options_.max_bad_steps,
       saved.empty() ? std::string("no checkpoint was written yet; try a lower --lr")
                     : fmt::format("the last good checkpoint is {}; try a lower --lr", saved.back().folder));
}

void Run::checkpoint() {
  monitor_->pause();
  const std::string folder = save_checkpoint(options_.out, *training_.state, *training_.optimizer,
                                             {.seed = options_.seed,
                                              .step = step_,
                                              .images_seen = step_ * options_.global_batch,
                                              .bad_steps = bad_steps_,
                                              .train_seconds = train_seconds(),
                                              .num_threads = at::get_num_threads(),
                                              .machine = machine_name(device_),
                                              .log_window = monitor_->window(),
                                              .config = config_});
  last_saved_ = step_;
  prune_checkpoints(options_.out, options_.keep_checkpoints);
  fmt::print("checkpoint {}\n", folder);
  write_report(options_.out);
  monitor_->resume();
}

void Run::sample() {
  monitor_->pause();
  const SampleGrid grid = draw_sample_grid(options_, info_, *training_.state, data_.decoder.get(), device_,
                                           [this] { return stop_.requested(); });
  if (!grid.png.empty()) {
    fs::create_directories(options_.out + "/samples");
    const std::string path = fmt::format("{}/samples/{}.png", options_.out, checkpoint_name(step_));
    write_file_atomically("samples", path, {reinterpret_cast<const char*>(grid.png.data()), grid.png.size()});
    monitor_->image("samples", grid.png, grid.height, grid.width, step_);
    fmt::print("samples {}\n", path);
  }
  monitor_->resume();
}

}  // namespace

void train(const TrainOptions& options, const RunContext& context) {
  validate(options);
  const int64_t world_size = ranks_from_environment().world_size;
  if (world_size > 1)  // several processes would write the same run
    fail("train", "expected one process, a launcher started {}: start kiln train without it", world_size);
  Run(options, context).train();
}

}  // namespace kiln
