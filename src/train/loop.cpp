// The order of things in a run: data and model are checked against each other, the newest checkpoint is
// found, then batches are stepped, logged, validated, sampled and saved until the run is done.
#include "train/loop.h"

#include <cmath>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/stop_signal.h"
#include "optim/lr_schedule.h"
#include "train/bad_step.h"
#include "train/report.h"
#include "train/run_checkpoints.h"
#include "train/run_progress.h"
#include "train/run_ranks.h"
#include "train/run_watch.h"
#include "train/sample_grid.h"
#include "train/training_run.h"

namespace kiln {

namespace {

constexpr int64_t kComparedSteps = 100;  // after which the plan is compared for the first time

class Loop {
 public:
  Loop(const TrainOptions& options, const RunContext& context)
      : run_(options, context.group),
        predicted_(context.predicted),
        lr_schedule_(lr_schedule_of(options)),
        progress_(options, run_.is_alone()),
        checkpoints_(run_, progress_) {}

  void train();
  // An error has ended the run: the checkpoint that is being written need not be lost with it.
  void keep_checkpoint();

 private:
  void start();
  void train_step();
  std::shared_ptr<const Batch> next_batch();
  void handle_bad_step(const StepResult& result);
  void compare_with_plan();
  void validate();
  void sample();
  bool is_due(int64_t every) const { return every > 0 && progress_.step % every == 0; }
  bool stopping() const { return run_.is_alone() ? stop_.requested() : stop_agreed_; }

  StopSignal stop_;
  TrainingRun run_;
  nlohmann::json predicted_;
  LrSchedule lr_schedule_;
  RunProgress progress_;
  RunCheckpoints checkpoints_;
  std::optional<RunWatch> watch_;  // once the run is built
  bool stop_agreed_ = false;       // of several ranks, by what the last step told all of them
};

void Loop::train() {
  start();
  const TrainOptions& options = run_.options;
  while (!progress_.finished() && !stopping()) {
    train_step();
    checkpoints_.poll(*watch_);
    if (watch_->num_steps() == kComparedSteps) compare_with_plan();
    if (run_.validation && !stopping() && (is_due(options.validate_every) || progress_.finished()))
      validate();
    if (is_due(options.sample_every)) sample();
    if (is_due(options.checkpoint_every)) checkpoints_.begin(*watch_);
  }
  watch_->finish();
  if (!checkpoints_.is_saved(progress_.step)) checkpoints_.begin(*watch_);
  checkpoints_.finish(*watch_);
  compare_with_plan();
  if (run_.is_first())
    fmt::print("{} after step {} ({} images): {}\n", stopping() ? "stopped by a signal" : "finished",
               progress_.step, progress_.step * options.global_batch, options.out);
}

void Loop::start() {
  run_.check_same_on_all_ranks();
  checkpoints_.open_folder();
  run_.build();
  const std::optional<TrainStateInfo> resumed = checkpoints_.restore();
  run_.write_description();
  watch_.emplace(run_, progress_, predicted_, resumed);
  run_.print_description();
  progress_.start_clock();
}

void Loop::train_step() {
  const Training& training = run_.training;
  watch_->before_batch();
  const int64_t batches_ready = run_.batches->ready();
  const std::shared_ptr<const Batch> batch = next_batch();
  const StepBatch tensors = as_tensors(*batch, *training.objective);
  const double lr = lr_at(lr_schedule_, progress_.step, progress_.share());
  ++progress_.step;
  watch_->before_step();
  const StepResult result = training.step->run(
      tensors, lr, {stop_.requested() ? 1.0 : 0.0, run_.is_first() ? progress_.clock_seconds() : 0.0});
  stop_agreed_ = result.shared[0] > 0;
  progress_.agree(result.shared[1]);
  watch_->after_step();
  const double stall_seconds = run_.batches->take_stall_seconds();
  watch_->log_step(result, lr, stall_seconds, batches_ready);
  if (result.applied)
    progress_.bad_steps = 0;
  else
    handle_bad_step(result);
  watch_->end_step(stall_seconds);
}

std::shared_ptr<const Batch> Loop::next_batch() {
  if (!run_.data.encodes_images || watch_->num_steps() > 0) return run_.batches->next();
  const PhaseMemory::Phase phase(run_.phase_memory, "extract");
  return run_.batches->next();
}

// Nothing has moved. A gradient that only overflowed fp16 costs a step, no more: the loss scale shrinks.
void Loop::handle_bad_step(const StepResult& result) {
  const TrainOptions& options = run_.options;
  const LossScaler& scaler = run_.training.state->loss_scaler;
  if (std::isfinite(result.loss) && scaler.explains_overflow(result.loss_scale))
    return watch_->loss_scale(scaler.scale());
  const int64_t step = progress_.step, batch = options.global_batch;
  const std::vector<BatchSample> samples = samples_at(*run_.training.objective, options.seed,
                                                      run_.batches->num_samples(), (step - 1) * batch, batch);
  watch_->bad_step(bad_step_report(step, result, samples, run_.data.sample_name));
  if (++progress_.bad_steps <= options.max_bad_steps) return;
  checkpoints_.finish(*watch_);
  const std::vector<Checkpoint> saved = list_checkpoints(options.out);
  fail("train", "{} steps in a row were not finite, the last is {} (--max-bad-steps {}): {}",
       progress_.bad_steps, step, options.max_bad_steps,
       saved.empty() ? std::string("no checkpoint was written yet; try a lower --lr")
                     : fmt::format("the last good checkpoint is {}; try a lower --lr", saved.back().folder));
}

void Loop::compare_with_plan() {
  watch_->compare_with_plan();
  if (run_.is_first()) write_report(run_.options.out);
}

void Loop::validate() {
  const PhaseMemory::Phase phase(run_.phase_memory, "validation");
  const RunWatch::Pause pause(*watch_);
  const auto loss = run_.validation->run(run_.training, run_.device, [this] { return stop_.requested(); });
  if (loss) watch_->validation(*loss);
}

void Loop::sample() {
  const PhaseMemory::Phase phase(run_.phase_memory, "validation sampling");
  const RunWatch::Pause pause(*watch_);
  watch_->samples(draw_sample_grid(run_.options, run_.info, run_.training, run_.data.decoder.get(),
                                   run_.device, [this] { return stop_.requested(); }));
}

// Several ranks cannot agree on it any more.
void Loop::keep_checkpoint() {
  if (!run_.is_alone() || !watch_) return;
  try {
    checkpoints_.finish(*watch_);
  } catch (const std::exception&) {  // the one before is what is told
  }
}

}  // namespace

void train(const TrainOptions& options, const RunContext& context) {
  validate(options);
  std::optional<Loop> loop;  // outlives an error: the others are told before anything waits for them
  as_rank(*context.group, [&] {
    loop.emplace(options, context);
    try {
      loop->train();
    } catch (const std::exception&) {
      loop->keep_checkpoint();
      throw;
    }
  });
}

}  // namespace kiln
