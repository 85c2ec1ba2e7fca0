// The order of things: data and model are checked against each other, the newest checkpoint is found, then
// batches are stepped, logged, sampled and saved until the run is done.
#include "train/loop.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "core/file_lock.h"
#include "core/stop_signal.h"
#include "core/tensors.h"
#include "models/registry.h"
#include "optim/lr_schedule.h"
#include "parallel/agreement.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "train/bad_step.h"
#include "train/checkpoint_saver.h"
#include "train/checkpoints.h"
#include "train/monitor.h"
#include "train/observer_group.h"
#include "train/phase_memory.h"
#include "train/profiler.h"
#include "train/report.h"
#include "train/run_checks.h"
#include "train/run_ranks.h"
#include "train/sample_grid.h"
#include "train/step.h"
#include "train/step_measurement.h"
#include "train/training_data.h"
#include "train/validation.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kComparedSteps = 100;  // after which the plan is compared for the first time

class Run {
 public:
  Run(const TrainOptions& options, const RunContext& context);
  void train();
  void keep_checkpoint();

 private:
  void warn(const std::string& text) const;
  void describe() const;
  void watch();
  void build();
  std::string checkpoint_to_resume();
  void resume_or_start();
  void open_monitor();
  std::string weights_identity() const;
  TrainStateInfo state_info() const;
  std::shared_ptr<const Batch> next_batch();
  void train_step();
  void log_step(const StepResult& result, double lr, double stall_seconds, int64_t batches_ready);
  at::Tensor timesteps_of_step() const;
  std::vector<BatchSample> samples_of_step() const;
  void handle_bad_step(const StepResult& result);
  void compare_with_plan();
  void checkpoint();
  void finish_checkpoint();
  void complete_checkpoint(const std::optional<std::string>& folder);
  void sample();
  void validate();
  double clock_seconds() const;
  double train_seconds() const;
  double progress() const;
  bool finished() const;
  bool is_due(int64_t every) const { return every > 0 && step_ % every == 0; }
  bool is_first() const { return context_.group->rank() == 0; }  // the one that writes and prints
  bool is_alone() const { return context_.group->world_size() == 1; }
  bool stopping() const { return is_alone() ? stop_.requested() : stop_agreed_; }
  double max_seconds() const { return options_.max_minutes * 60; }

  TrainOptions options_;
  RunContext context_;
  std::optional<FileLock> lock_;  // rank 0's, on the run folder: given back last
  StopSignal stop_;
  at::Device device_;
  at::ScalarType compute_dtype_;
  LrSchedule lr_schedule_;
  TrainingData data_;
  RunInfo info_;
  nlohmann::json config_;  // options and data identity, as checkpoints keep them
  Training training_;
  std::unique_ptr<CheckpointSaver> saver_;
  std::unique_ptr<BatchSource> batches_;
  std::optional<Validation> validation_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;  // rank 0's
  std::unique_ptr<StepProfiler> profiler_;
  std::unique_ptr<StepMeasurement> measurement_;
  PhaseMemory phase_memory_;
  double peak_flops_ = 0;

  int64_t step_ = 0, bad_steps_ = 0, last_saved_ = -1;
  double earlier_seconds_ = 0;  // of training in earlier processes
  Clock::time_point begin_ = Clock::now();
  // Several ranks stop, and follow the clock, by what the last step told all of them.
  bool stop_agreed_ = false;
  double agreed_seconds_ = 0;
};

Run::Run(const TrainOptions& options, const RunContext& context)
    : options_(options),
      context_(context),
      device_(parse_device(options.device, context.group->ranks().local_rank)),
      compute_dtype_(parse_compute_dtype(options.compute_dtype)),
      lr_schedule_(lr_schedule_of(options)),
      phase_memory_(device_) {
  apply(ComputeSettings{.device = device_,
                        .threads = options.threads,
                        .cpu_share = cpu_share(*context.group),
                        .tf32 = options.tf32,
                        .deterministic = options.deterministic});
  for (const std::string& line : settings_without_effect(options, device_, context.group->world_size()))
    warn(line);
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
  if (!options.validation_data.empty()) validation_.emplace(options, data_);
  config_ = {{"options", to_json(options)}, {"data", data_.identity}};
}

void Run::warn(const std::string& text) const {
  if (is_first()) fmt::print(stderr, "warning: {}\n", text);
}

void Run::build() {
  {
    const PhaseMemory::Phase phase(phase_memory_, "load");
    training_ = build_training(options_, data_.shape, device_, context_.group);
  }
  if (training_.state->nvme)
    for (const std::string& note : training_.state->nvme->store()->notes()) warn(note);
  const DenoiserShape& shape = training_.denoiser->shape();
  batches_ = data_.batches({.seed = options_.seed,
                            .global_batch = options_.global_batch,
                            .rank = context_.group->rank(),
                            .world_size = context_.group->world_size(),
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
  if (monitor_) observers_.add(&monitor_->timers());
  measurement_ = std::make_unique<StepMeasurement>(device_, options_.global_batch, *training_.state,
                                                   data_.decoder.get(), observers_);
  if (options_.profile.empty() || !is_first()) return;
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
  if (!is_first()) return;
  int64_t num_weights = 0;
  for (const auto& segment : training_.state->segments)
    for (const FlatSlot& slot : segment.unit.layout().slots) num_weights += slot.numel;
  fmt::print("{}: {:.1f} M weights, {} x {} x {} latents, {} classes, {}, {} on {} with {} threads\n",
             info_.model, static_cast<double>(num_weights) / 1e6, data_.shape.channels, data_.shape.height,
             data_.shape.width, data_.shape.num_classes, options_.objective, options_.compute_dtype,
             machine_name(device_), at::get_num_threads());
  if (!is_alone())
    fmt::print("{} ranks, {} on this machine, ZeRO stage {}\n", context_.group->world_size(),
               context_.group->ranks().local_world_size, options_.zero_stage);
}

// Empty: there is none. Rank 0 readies the run folder.
std::string Run::checkpoint_to_resume() {
  if (is_first()) {
    std::error_code error;
    fs::create_directories(fs::path(options_.out) / "checkpoints", error);
    if (error) fail("train", "cannot create --out {}: {}", options_.out, error.message());
    lock_.emplace("train", options_.out + "/.lock",
                  fmt::format("{} is being written by another kiln train: wait for its end, end it, or give "
                              "another --out",
                              options_.out));
  }
  const std::optional<Checkpoint> newest = newest_checkpoint(options_.out, *context_.group);
  if (is_first()) {
    for (const std::string& damage : damaged_checkpoints(options_.out))
      warn("passed over, it is damaged: " + damage);
    if (newest)
      for (const std::string& line :
           resume_warnings(options_, read_train_state(newest->folder), state_info()))
        warn(line);
    prune_checkpoints(options_.out, /*keep=*/0);
  }
  context_.group->barrier("the run folder");
  return newest ? newest->folder : std::string();
}

void Run::resume_or_start() {
  const std::string folder = checkpoint_to_resume();
  // On every rank at once: beside the others is how each of them computes. Before there is state, which may
  // leave no room.
  peak_flops_ =
      options_.peak_tflops > 0 ? options_.peak_tflops * 1e12 : measure_peak_flops(device_, compute_dtype_);
  build();
  TrainStateInfo saved;
  if (!folder.empty()) {
    const PhaseMemory::Phase phase(phase_memory_, "resume");
    saved = load_checkpoint(folder, *training_.state, *training_.optimizer);
    step_ = last_saved_ = saved.step;
    bad_steps_ = saved.bad_steps;
    earlier_seconds_ = saved.train_seconds;
    batches_->seek(saved.images_seen);
  }
  saver_ = std::make_unique<CheckpointSaver>(
      options_.out, *training_.state, *training_.optimizer,
      checkpoint_copy_of(options_.checkpoint_copy, device_, training_.state->placement));
  agreed_seconds_ = earlier_seconds_;
  if (!is_first()) return;
  write_run_info(options_.out, info_);
  write_file_atomically("train", options_.out + "/config.toml", to_toml(options_));
  open_monitor();
  if (folder.empty()) return;
  monitor_->restore_window(saved.log_window);
  monitor_->event({{"event", "resume"}, {"step", step_}});
  fmt::print("resuming {} from step {} ({} images seen)\n", options_.out, step_, saved.images_seen);
}

void Run::open_monitor() {
  monitor_ = std::make_unique<Monitor>(
      MonitorOptions{
          .run = options_.out,
          .global_batch = options_.global_batch,
          .max_steps = options_.max_steps,
          .log_every = options_.log_every,
          .max_seconds = max_seconds(),
          .flops_per_image = 3 * training_.denoiser->shape().forward_flops,  // backward is twice the forward
          .peak_flops = peak_flops_ * static_cast<double>(context_.group->world_size()),
          .device = device_,
          .tensorboard = options_.tensorboard},
      step_);
}

// Empty: there are none, or nobody to compare them with.
std::string Run::weights_identity() const {
  std::string digest;
  if (!options_.weights.empty() && !is_alone())
    agree(*context_.group, "--weights", [&] { digest = digest_of_weights(options_.weights); });
  return digest;
}

double Run::clock_seconds() const {
  return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - begin_).count();
}

double Run::train_seconds() const { return is_alone() ? clock_seconds() : agreed_seconds_; }

double Run::progress() const {
  const double by_steps = static_cast<double>(step_) / static_cast<double>(options_.max_steps);
  return max_seconds() > 0 ? std::max(by_steps, train_seconds() / max_seconds()) : by_steps;
}

bool Run::finished() const {
  return step_ >= options_.max_steps || (max_seconds() > 0 && train_seconds() >= max_seconds());
}

void Run::train() {
  require_same_on_all_ranks(*context_.group,
                            {{"the content of --data", data_.identity},
                             {"the content of --validation-data", validation_ ? validation_->identity() : ""},
                             {"the content of --weights", weights_identity()}});
  if (validation_ && validation_->identity() == data_.identity)
    warn(
        "--validation-data holds the samples of --data: its loss tells nothing that the training's does not");
  resume_or_start();
  watch();
  describe();
  begin_ = Clock::now();
  while (!finished() && !stopping()) {
    train_step();
    complete_checkpoint(saver_->poll());
    if (measurement_->num_steps() == kComparedSteps) {
      compare_with_plan();
      if (is_first()) write_report(options_.out);
    }
    if (validation_ && !stopping() && (is_due(options_.validate_every) || finished())) validate();
    if (is_due(options_.sample_every)) sample();
    if (is_due(options_.checkpoint_every)) checkpoint();
  }
  if (profiler_) profiler_->finish();
  if (last_saved_ != step_) checkpoint();
  finish_checkpoint();
  compare_with_plan();
  if (!is_first()) return;
  write_report(options_.out);
  fmt::print("{} after step {} ({} images): {}\n", stopping() ? "stopped by a signal" : "finished", step_,
             step_ * options_.global_batch, options_.out);
}

std::shared_ptr<const Batch> Run::next_batch() {
  if (!data_.encodes_images || measurement_->num_steps() > 0) return batches_->next();
  const PhaseMemory::Phase phase(phase_memory_, "extract");
  return batches_->next();
}

void Run::train_step() {
  measurement_->begin_step();
  const int64_t batches_ready = batches_->ready();
  const std::shared_ptr<const Batch> batch = next_batch();
  const StepBatch tensors = as_tensors(*batch, *training_.objective);
  const double lr = lr_at(lr_schedule_, step_, progress());
  ++step_;
  if (profiler_) profiler_->begin_step(step_);
  measurement_->begin_run();
  const StepResult result =
      training_.step->run(tensors, lr, {stop_.requested() ? 1.0 : 0.0, is_first() ? clock_seconds() : 0.0});
  stop_agreed_ = result.shared[0] > 0;
  agreed_seconds_ = result.shared[1];
  if (monitor_) monitor_->timers().end_step();
  measurement_->end_run();
  if (profiler_) profiler_->end_step(step_);
  const double stall_seconds = batches_->take_stall_seconds();
  if (monitor_) log_step(result, lr, stall_seconds, batches_ready);
  if (result.applied)
    bad_steps_ = 0;
  else
    handle_bad_step(result);
  measurement_->end_step(stall_seconds);
}

void Run::log_step(const StepResult& result, double lr, double stall_seconds, int64_t batches_ready) {
  const at::Tensor positions =
      training_.objective->position(timesteps_of_step()).to(at::kDouble).contiguous();
  monitor_->step(
      {.step = step_,
       .images_seen = step_ * options_.global_batch,
       .lr = lr,
       .train_seconds = train_seconds(),
       .stall_seconds = stall_seconds,
       .batches_ready = batches_ready,
       .result = &result,
       .positions = {positions.data_ptr<double>(), positions.data_ptr<double>() + positions.numel()}});
}

// Of the whole global batch of this step: what the loaders of all ranks draw.
at::Tensor Run::timesteps_of_step() const {
  const int64_t first_position = (step_ - 1) * options_.global_batch;
  std::vector<double> time_uniform(static_cast<size_t>(options_.global_batch));
  for (size_t i = 0; i < time_uniform.size(); ++i)
    time_uniform[i] = time_uniform_at(options_.seed, first_position + static_cast<int64_t>(i));
  return training_.objective->timesteps(
      at::from_blob(time_uniform.data(), {options_.global_batch}, at::kDouble).clone());
}

std::vector<BatchSample> Run::samples_of_step() const {
  const at::Tensor timesteps = timesteps_of_step();
  std::vector<BatchSample> samples;
  for (int64_t i = 0; i < options_.global_batch; ++i)
    samples.push_back(
        {sample_at(options_.seed, batches_->num_samples(), (step_ - 1) * options_.global_batch + i),
         timesteps[i].item<double>()});
  return samples;
}

// RUN/plan.json: what the plan said beside what was measured so far.
void Run::compare_with_plan() {
  if (measurement_->num_steps() == 0 || !is_first()) return;
  StepFigures measured = measurement_->figures();
  measured.by_phase.insert(phase_memory_.peak_bytes().begin(), phase_memory_.peak_bytes().end());
  const nlohmann::json comparison = comparison_json(context_.predicted, measured);
  write_file_atomically("plan", options_.out + "/plan.json", comparison.dump(1) + "\n");
  for (const auto& finding : comparison.at("findings")) fmt::print("plan: {}\n", finding.get<std::string>());
}

// Nothing has moved. A gradient that only overflowed fp16 costs a step, no more: the loss scale shrinks.
void Run::handle_bad_step(const StepResult& result) {
  if (std::isfinite(result.loss) && training_.state->loss_scaler.explains_overflow(result.loss_scale)) {
    if (monitor_)
      monitor_->event(
          {{"event", "loss_scale"}, {"step", step_}, {"loss_scale", training_.state->loss_scaler.scale()}});
    return;
  }
  const BadStepReport report =
      bad_step_report(step_, result, samples_of_step(), [this](int64_t id) { return data_.sample_name(id); });
  warn(report.text);
  if (monitor_) monitor_->event(report.event);
  if (++bad_steps_ <= options_.max_bad_steps) return;
  finish_checkpoint();
  const std::vector<Checkpoint> saved = list_checkpoints(options_.out);
  fail("train", "{} steps in a row were not finite, the last is {} (--max-bad-steps {}): {}", bad_steps_,
       step_, options_.max_bad_steps,
       saved.empty() ? std::string("no checkpoint was written yet; try a lower --lr")
                     : fmt::format("the last good checkpoint is {}; try a lower --lr", saved.back().folder));
}

TrainStateInfo Run::state_info() const {
  return {.seed = options_.seed,
          .step = step_,
          .images_seen = step_ * options_.global_batch,
          .bad_steps = bad_steps_,
          .train_seconds = train_seconds(),
          .num_threads = at::get_num_threads(),
          .world_size = context_.group->world_size(),
          .machine = machine_name(device_),
          .log_window = monitor_ ? monitor_->window() : nlohmann::json(),
          .config = config_};
}

void Run::checkpoint() {
  const PhaseMemory::Phase phase(phase_memory_, "checkpoint");
  finish_checkpoint();
  if (monitor_) monitor_->pause();
  saver_->begin(state_info());
  last_saved_ = step_;
  if (monitor_) monitor_->resume();
}

// Waits for the checkpoint that is being written, if there is one.
void Run::finish_checkpoint() {
  if (saver_ && saver_->under_way()) complete_checkpoint(saver_->finish());
}

// An error has ended the run: what is being written need not be lost with it. Several ranks cannot agree on
// it any more.
void Run::keep_checkpoint() {
  if (!is_alone()) return;
  try {
    finish_checkpoint();
  } catch (const std::exception&) {  // the one before is what is told
  }
}

// One is on the disk, in `folder`; none: nothing has happened.
void Run::complete_checkpoint(const std::optional<std::string>& folder) {
  if (!folder || !is_first()) return;
  monitor_->pause();
  prune_checkpoints(options_.out, options_.keep_checkpoints);
  fmt::print("checkpoint {}\n", *folder);
  write_report(options_.out);
  monitor_->resume();
}

void Run::sample() {
  const PhaseMemory::Phase phase(phase_memory_, "validation sampling");
  if (monitor_) monitor_->pause();
  const SampleGrid grid = draw_sample_grid(options_, info_, training_, data_.decoder.get(), device_,
                                           [this] { return stop_.requested(); });
  if (!is_first()) return;
  if (!grid.png.empty()) {
    fs::create_directories(options_.out + "/samples");
    const std::string path = fmt::format("{}/samples/{}.png", options_.out, checkpoint_name(step_));
    write_file_atomically("samples", path, {reinterpret_cast<const char*>(grid.png.data()), grid.png.size()});
    monitor_->image("samples", grid.png, grid.height, grid.width, step_);
    fmt::print("samples {}\n", path);
  }
  monitor_->resume();
}

void Run::validate() {
  const PhaseMemory::Phase phase(phase_memory_, "validation");
  if (monitor_) monitor_->pause();
  const auto loss = validation_->run(training_, device_, [this] { return stop_.requested(); });
  if (!monitor_) return;
  if (loss) monitor_->validation(step_, *loss, validation_->weights());
  monitor_->resume();
}

}  // namespace

void train(const TrainOptions& options, const RunContext& context) {
  validate(options);
  std::optional<Run> run;  // outlives an error: the others are told before anything waits for them
  as_rank(*context.group, [&] {
    run.emplace(options, context);
    try {
      run->train();
    } catch (const std::exception&) {
      run->keep_checkpoint();
      throw;
    }
  });
}

}  // namespace kiln
