#include "train/run_watch.h"

#include <utility>

#include "core/atomic_file.h"
#include "train/step_batch.h"

namespace kiln {

namespace {

// Null on other ranks than the first.
std::unique_ptr<Monitor> make_monitor(const TrainingRun& run, const RunProgress& progress) {
  if (!run.is_first()) return nullptr;
  const TrainOptions& options = run.options;
  return std::make_unique<Monitor>(
      MonitorOptions{.run = options.out,
                     .global_batch = options.global_batch,
                     .max_steps = options.max_steps,
                     .log_every = options.log_every,
                     .max_seconds = progress.max_seconds(),
                     .flops_per_image =
                         3 * run.training.denoiser->shape().forward_flops,  // backward is twice the forward
                     .peak_flops = run.peak_flops * static_cast<double>(run.group->world_size()),
                     .device = run.device,
                     .tensorboard = options.tensorboard},
      progress.step);
}

}  // namespace

RunWatch::RunWatch(TrainingRun& run, const RunProgress& progress, nlohmann::json predicted,
                   const std::optional<TrainStateInfo>& resumed)
    : run_(run),
      progress_(progress),
      predicted_(std::move(predicted)),
      monitor_(make_monitor(run, progress)),
      measurement_(run.device, run.options.global_batch, *run.training.state, run.data.decoder.get(),
                   observers_) {
  if (monitor_) observers_.add(&monitor_->timers());
  if (monitor_ && resumed) resume(*resumed);
  if (!run.options.profile.empty() && run.is_first()) profile();
  run.training.step->observe(&observers_);
}

void RunWatch::resume(const TrainStateInfo& saved) {
  monitor_->restore_window(saved.log_window);
  monitor_->event({{"event", "resume"}, {"step", saved.step}});
  fmt::print("resuming {} from step {} ({} images seen)\n", run_.options.out, saved.step, saved.images_seen);
}

void RunWatch::profile() {
  const StepRange steps = parse_profile(run_.options.profile);
  StepProfiler::Options options{
      .steps = steps,
      .path = fmt::format("{}/profile-{}-{}.json", run_.options.out, steps.first, steps.last),
      .device = run_.device,
      .segments = {}};
  for (const auto& segment : run_.training.denoiser->segments()) options.segments.push_back(segment->name());
  profiler_ = std::make_unique<StepProfiler>(std::move(options));
  observers_.add(profiler_.get());
}

void RunWatch::before_batch() { measurement_.begin_step(); }

void RunWatch::before_step() {
  if (profiler_) profiler_->begin_step(progress_.step);
  measurement_.begin_run();
}

void RunWatch::after_step() {
  if (monitor_) monitor_->timers().end_step();
  measurement_.end_run();
  if (profiler_) profiler_->end_step(progress_.step);
}

void RunWatch::log_step(const StepResult& result, double lr, double stall_seconds, int64_t batches_ready) {
  if (!monitor_) return;
  const int64_t batch = run_.options.global_batch, step = progress_.step;
  monitor_->step(
      {.step = step,
       .images_seen = step * batch,
       .lr = lr,
       .train_seconds = progress_.seconds(),
       .stall_seconds = stall_seconds,
       .batches_ready = batches_ready,
       .result = &result,
       .positions = positions_at(*run_.training.objective, run_.options.seed, (step - 1) * batch, batch)});
}

void RunWatch::end_step(double stall_seconds) { measurement_.end_step(stall_seconds); }

void RunWatch::loss_scale(double scale) {
  if (monitor_) monitor_->event({{"event", "loss_scale"}, {"step", progress_.step}, {"loss_scale", scale}});
}

void RunWatch::bad_step(const BadStepReport& report) {
  run_.warn(report.text);
  if (monitor_) monitor_->event(report.event);
}

void RunWatch::samples(const SampleGrid& grid) {
  if (!monitor_ || grid.png.empty()) return;
  const std::string path = write_sample_grid(run_.options.out, progress_.step, grid);
  monitor_->image("samples", grid.png, grid.height, grid.width, progress_.step);
  fmt::print("samples {}\n", path);
}

void RunWatch::validation(const ValidationLoss& loss) {
  if (monitor_) monitor_->validation(progress_.step, loss, run_.validation->weights());
}

void RunWatch::compare_with_plan() {
  if (num_steps() == 0 || !run_.is_first()) return;
  StepFigures measured = measurement_.figures();
  measured.by_phase.insert(run_.phase_memory.peak_bytes().begin(), run_.phase_memory.peak_bytes().end());
  const nlohmann::json comparison = comparison_json(predicted_, measured);
  write_file_atomically("plan", run_.options.out + "/plan.json", comparison.dump(1) + "\n");
  for (const auto& finding : comparison.at("findings")) fmt::print("plan: {}\n", finding.get<std::string>());
}

void RunWatch::finish() {
  if (profiler_) profiler_->finish();
}

}  // namespace kiln
