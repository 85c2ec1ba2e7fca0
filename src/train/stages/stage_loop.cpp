// The order of a stage: data and model are checked against each other, the newest checkpoint is found, then
// the stage trains, logs, validates, samples and saves until it is done.
#include "train/stages/stage_loop.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/memory_limits.h"
#include "core/text/printable.h"
#include "data/loader/batches.h"
#include "optim/lr_schedule.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "train/bad_step.h"
#include "train/checkpoints.h"
#include "train/sample_grid.h"

namespace kiln {

namespace {

constexpr int64_t kComparedSteps = 100;  // after this many steps the plan is compared for the first time

}  // namespace

StageLoop::StageLoop(const StagePlan& plan, const StageFit& fit, const RunContext& context,
                     const StopSignal& stop, bool is_next, double steps_ahead)
    : stop_(stop),
      plan_(plan),
      run_(fit.options, context.group, plan.stage().first_step),
      progress_(fit.options, plan.stage().first_step),
      predicted_(fit.predicted),
      is_next_(is_next),
      steps_ahead_(steps_ahead) {
  run_.data_sheet_flops = context.data_sheet_flops;
  saves_the_end_ = context.saves_the_end || !plan.is_last();  // the next stage begins with a checkpoint
  audits_precision_ = context.audits_precision;
  on_timed_operations_ = context.on_timed_operations;
  is_continued_ = !context.ahead.empty();
  plan.record(run_.config, run_.data.identity);
}

bool StageLoop::train() {
  if (!start()) return true;
  const TrainOptions& options = run_.options;
  while (!progress_.finished() && !stopping()) {
    train_step();
    announce_checkpoint(saver_->poll());
    if (watch_->num_steps() == kComparedSteps) compare_with_plan();
    if (!stopping() && (is_due(options.validation.every) || progress_.finished())) validate();
    if (is_due(options.samples.every) || is_asked(RunRequest::kSample) ||
        (options.samples.every > 0 && progress_.finished()))
      sample();
    if (run_.evaluation && !stopping() && (is_due(options.evaluation.every) || progress_.finished()))
      evaluate();
    if (is_due(options.checkpoints.every) || is_asked(RunRequest::kCheckpoint)) begin_checkpoint();
  }
  watch_->finish();
  if (saves_the_end_ && last_saved_ != progress_.step) begin_checkpoint();
  finish_checkpoint();
  compare_with_plan();
  const bool goes_on = !plan_.is_last() && !stopping() && !progress_.out_of_time();
  if (run_.is_first() && goes_on)
    fmt::print("{} is done after step {}\n", printable(plan_.stage().name), progress_.step);
  if (requests_ && !goes_on) requests_->forget();
  if (run_.is_first() && !goes_on)
    fmt::print("{} after step {} ({} images): {}\n",
               !stopping()      ? "finished"
               : is_stop_asked_ ? "stopped by a request"
                                : "stopped by a signal",
               progress_.step, progress_.step * options.global_batch, options.out);
  return goes_on;
}

// Walks the largest batch once before the first step if batches differ in shape. So no later step is the
// first to need that much memory.
void StageLoop::rehearse() {
  rehearse_encoders();
  DataShape largest = run_.data.shape;
  const bool differ = largest.lanes.size() > 1 || (largest.text.width > 0 && !largest.text.is_padded);
  if (!differ) return;
  largest.lanes = {largest.largest()};
  largest.text.is_padded = true;
  BatchOptions options = batch_options_of(run_.options);
  options.rank = run_.group->rank();
  options.world_size = run_.group->world_size();
  options.num_threads = 1;
  options.prefetch = 1;
  const auto batches = synthetic_batches(largest, options);
  const std::shared_ptr<const Batch> batch = batches->next();
  watch_->watch_rehearsal(
      [&] { run_.training.step->rehearse(as_tensors(*batch, *run_.training.objective)); });
}

void StageLoop::rehearse_encoders() {
  const TrainingData& data = run_.data;
  const int64_t ranks = run_.group->world_size();
  const bool encodes_lanes = data.pictures.lanes && data.decoder && data.shape.lanes.size() > 1;
  if (encodes_lanes) {
    const PhaseMemory::Phase phase(run_.phase_memory, "extract");
    rehearse_encoding(*data.decoder, data.shape.largest(), rows_of_walk(run_.options, ranks), run_.device);
  }
  if (!data.captions || data.shape.text.is_padded) return;
  const PhaseMemory::Phase phase(run_.phase_memory, "extract");
  data.captions->rehearse((run_.options.global_batch + ranks - 1) / ranks);
}

// Returns false if the newest undamaged checkpoint belongs to another stage.
bool StageLoop::start() {
  run_.check_same_on_all_ranks();
  folder_ = open_run_folder(run_, state_info(), plan_);
  if (folder_.step != plan_.step) return false;
  if (run_.is_first()) requests_.emplace(run_.options.out, /*forgets=*/!is_next_);
  run_.record_pictures(/*begins_stage=*/folder_.step == plan_.stage().first_step);
  run_.build();
  const std::optional<TrainStateInfo> resumed = resume();
  agree(*run_.group, "the room for checkpoints", [&] {
    if (!run_.is_first()) return;
    if (const std::string warning = check_space(checkpoint_space()); !warning.empty()) run_.warn(warning);
  });
  if (is_continued_ && progress_.stage_step() == 0 && progress_.out_of_time())
    fail("train",
         "--max-minutes {:g} is used up, {} has trained for {:.3g} minutes: --continue-with needs a larger "
         "--max-minutes, or 0 for no limit",
         run_.options.max_minutes, run_.options.out, progress_.seconds() / 60);
  // A finished stage keeps the description that it was trained with.
  if (!resumed || !progress_.finished()) run_.write_description(plan_.is_staged() ? plan_.run : run_.options);
  watch_.emplace(run_, progress_, predicted_, resumed, is_next_, steps_ahead_);
  if (audits_precision_) watch_->audit();
  if (on_timed_operations_ && !run_.options.compute.cuda_graph) watch_->time_operations(on_timed_operations_);
  announce_stage();
  run_.print_description();
  rehearse();
  progress_.start_clock();
  return true;
}

// Prints and logs which of several stages begins, and what has changed in the stages ahead.
void StageLoop::announce_stage() {
  const Stage& stage = plan_.stage();
  for (const std::string& note : plan_.notes)
    if (run_.is_first()) fmt::print("{}\n", printable(note));
  if (!plan_.is_staged()) return;
  if (!plan_.changes.empty()) watch_->stage_event({{"event", "changes"}, {"changes", plan_.changes}});
  if (progress_.step > stage.first_step) return;
  const TrainOptions& options = run_.options;
  watch_->stage_event({{"event", "stage"},
                       {"stage", plan_.current + 1},
                       {"of", plan_.stages.size()},
                       {"name", stage.name},
                       {"steps", stage.num_steps()},
                       {"samples", stage.num_samples},
                       {"image_size", options.data.image_size},
                       {"lr", options.lr.peak}});
  if (run_.is_first())
    fmt::print("{} of {}: {} steps, to step {}, at lr {:g}\n", printable(stage.name), plan_.stages.size(),
               stage.num_steps(), stage.last_step(), options.lr.peak);
}

// Loads the checkpoint to resume from, if there is one, and makes the saver of new ones.
std::optional<TrainStateInfo> StageLoop::resume() {
  const Training& training = run_.training;
  std::optional<TrainStateInfo> saved;
  if (!folder_.checkpoint.empty()) {
    const PhaseMemory::Phase phase(run_.phase_memory, "resume");
    saved = load_checkpoint(folder_.checkpoint, *training.state);
    progress_.step = last_saved_ = saved->step;
    progress_.bad_steps = saved->bad_steps;
    progress_.resume(saved->train_seconds);
    run_.batches->seek(saved->images_seen);
  }
  const CheckpointCopy copy = checkpoint_copy_of(run_.options.checkpoints.copy, training.state->placement);
  saver_ = std::make_unique<CheckpointSaver>(run_.options.out, *training.state, copy);
  return saved;
}

void StageLoop::train_step() {
  const Training& training = run_.training;
  RunWatch::Step watched{.begin = std::chrono::steady_clock::now()};
  watched.batches_ready = run_.batches->ready();
  const std::shared_ptr<const Batch> batch = next_batch();
  run_.say_left_out();
  const StepBatch tensors = as_tensors(*batch, *training.objective);
  watched.flops = flops_of_step(training, tensors);
  watched.lr = lr_at(run_.options.lr, progress_.stage_step(), progress_.share());
  ++progress_.step;
  const int64_t requests = new_requests();
  const RankSignals signals{
      .stop = stop_.requested(), .clock_seconds = progress_.clock_seconds(), .requests = requests};
  const StepResult result =
      watch_->watch_step([&] { return training.step->run(tensors, watched.lr, signals); });
  if (run_.products) run_.products->keep();
  agreed_stop_ = result.signals.stop;
  asked_ = result.signals.requests;
  progress_.agree(run_.is_alone() ? progress_.clock_seconds() : result.signals.clock_seconds);
  watched.stall_seconds = run_.batches->take_stall_seconds();
  watched.encoding = run_.batches->take_encoding_seconds();
  watch_->log_step(watched, result);
  refresh_report();
  if (result.applied)
    progress_.bad_steps = 0;
  else
    handle_bad_step(result);
}

// Returns what is asked of the run since the last step. A stop is passed on as a signal is.
int64_t StageLoop::new_requests() {
  if (!requests_) return 0;
  int64_t asked = requests_->take_new();
  if ((asked & bit_of(RunRequest::kStop)) != 0) {
    stop_.request();
    is_stop_asked_ = true;
  }
  if (run_.options.samples.every == 0 && (asked & bit_of(RunRequest::kSample)) != 0) {
    run_.warn("no grid is drawn on request: the run has no --sample-every");
    served(RunRequest::kSample);
    asked &= ~bit_of(RunRequest::kSample);
  }
  return asked;
}

void StageLoop::served(RunRequest request) {
  if (requests_) requests_->served(request);
}

std::shared_ptr<const Batch> StageLoop::next_batch() {
  if (!run_.data.encodes || watch_->num_steps() > 0) return run_.batches->next();
  const PhaseMemory::Phase phase(run_.phase_memory, "extract");
  return run_.batches->next();
}

// The step moved nothing. A gradient that only overflowed fp16 costs this step and shrinks the loss scale, no
// more.
void StageLoop::handle_bad_step(const StepResult& result) {
  const TrainOptions& options = run_.options;
  const LossScaler& scaler = run_.training.state->loss_scaler;
  if (std::isfinite(result.loss) && scaler.explains_overflow(result.loss_scale))
    return watch_->loss_scale(scaler.scale());
  const int64_t step = progress_.step, batch = options.global_batch;
  const std::vector<BatchSample> samples =
      samples_at(*run_.training.objective, options.seed, run_.batches->order(), (step - 1) * batch, batch);
  watch_->bad_step(bad_step_report(step, result, samples, run_.data.sample_name));
  if (++progress_.bad_steps <= options.max_bad_steps) return;
  finish_checkpoint();
  const std::vector<Checkpoint> saved = list_checkpoints(options.out);
  fail(
      "train",
      "{} steps in a row were not finite, the last is {} (--max-bad-steps {}), and {}: try a lower learning "
      "rate (--lr, or its key in a DeepSpeed file)",
      progress_.bad_steps, step, options.max_bad_steps,
      saved.empty() ? "no checkpoint was written yet" : "the last good checkpoint is " + saved.back().folder);
}

CheckpointSpace StageLoop::checkpoint_space() const {
  const CheckpointOptions& options = run_.options.checkpoints;
  const int64_t last = plan_.stages.back().last_step(), step = progress_.step;
  const bool adds_the_end =
      saves_the_end_ && step < last && (options.every == 0 || last % options.every != 0);
  return {.run = run_.options.out,
          .bytes = saver_->bytes(),
          .keep = options.keep,
          .num_ahead = (options.every > 0 ? last / options.every - step / options.every : 0) + adds_the_end,
          .available = available_bytes(run_.options.out)};
}

// Begins a checkpoint. Waits for the previous one first, since one is written at a time.
void StageLoop::begin_checkpoint() {
  const PhaseMemory::Phase phase(run_.phase_memory, "checkpoint");
  finish_checkpoint();
  const RunWatch::Pause pause(*watch_);
  const auto begin = std::chrono::steady_clock::now();
  if (run_.is_first()) make_room(checkpoint_space());
  TrainStateInfo state = state_info();
  state.log_window = watch_->window();
  saver_->begin(std::move(state));
  watch_->checkpoint_pause(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  last_saved_ = progress_.step;
  is_saving_asked_ = is_asked(RunRequest::kCheckpoint);
}

void StageLoop::finish_checkpoint() {
  if (saver_->under_way()) announce_checkpoint(saver_->finish());
}

// Announces the checkpoint in `folder`, which is on the disk now. Does nothing without a folder.
void StageLoop::announce_checkpoint(const std::optional<std::string>& folder) {
  if (!folder || !run_.is_first()) return;
  const RunWatch::Pause pause(*watch_);
  prune_checkpoints(run_.options.out, run_.options.checkpoints.keep);
  fmt::print("checkpoint {}\n", *folder);
  if (std::exchange(is_saving_asked_, false)) served(RunRequest::kCheckpoint);
  watch_->write_report();
}

// Writes the report after lines of the log, at most every 30 seconds and for at most a hundredth of the time:
// the whole log is read for it.
void StageLoop::refresh_report() {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  if (!run_.is_first() || !is_due(run_.options.watch.log_every) || begin < report_due_) return;
  const RunWatch::Pause pause(*watch_);
  watch_->write_report();
  const auto end = Clock::now();
  report_due_ = end + std::max<Clock::duration>(kReportPause, 100 * (end - begin));
}

void StageLoop::compare_with_plan() {
  watch_->compare_with_plan();
  watch_->write_report();
}

void StageLoop::validate() {
  if (!run_.validation) return;
  const PhaseMemory::Phase phase(run_.phase_memory, "validation");
  const RunWatch::Pause pause(*watch_);
  const auto loss = run_.validation->run(run_.training, run_.device, [this] { return stop_.requested(); });
  if (loss) watch_->validation(*loss);
}

void StageLoop::sample() {
  const PhaseMemory::Phase phase(run_.phase_memory, "validation sampling");
  const RunWatch::Pause pause(*watch_);
  watch_->samples(
      draw_sample_grid(run_.options, run_.grid_source(run_.prompts), [this] { return stop_.requested(); }));
  if (is_asked(RunRequest::kSample)) served(RunRequest::kSample);
  trim_heap();
}

void StageLoop::evaluate() {
  const PhaseMemory::Phase phase(run_.phase_memory, "evaluation");
  const RunWatch::Pause pause(*watch_);
  const Prompts prompts = run_.data.text
                              ? captions_of_samples(*run_.data.text, run_.options.evaluation.images,
                                                    run_.training.denoiser->shape().conditioning)
                              : Prompts();
  const auto result =
      run_.evaluation->run(run_.options, run_.grid_source(prompts), [this] { return stop_.requested(); });
  if (result) watch_->evaluation(*result);
  trim_heap();
}

TrainStateInfo StageLoop::state_info() const {
  return {.seed = run_.options.seed,
          .step = progress_.step,
          .images_seen = progress_.step * run_.options.global_batch,
          .bad_steps = progress_.bad_steps,
          .train_seconds = progress_.seconds(),
          .num_threads = at::get_num_threads(),
          .world_size = run_.group->world_size(),
          .machine = machine_name(run_.device),
          .config = run_.config};
}

// Only for a single rank: after an error several ranks cannot agree on a checkpoint.
void StageLoop::keep_checkpoint() {
  if (!run_.is_alone() || !watch_) return;
  try {
    finish_checkpoint();
  } catch (const std::exception&) {  // the earlier error is the one to report
  }
}

}  // namespace kiln
