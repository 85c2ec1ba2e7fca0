#include "train/run_watch.h"

#include <utility>

#include "core/files/atomic_file.h"
#include "step/step_batch.h"

namespace kiln {

namespace {

// Only rank 0 has one.
std::unique_ptr<Monitor> make_monitor(const TrainingRun& run, const Progress& progress) {
  if (!run.is_first()) return nullptr;
  const TrainOptions& options = run.options;
  return std::make_unique<Monitor>(
      MonitorOptions{.run = options.out,
                     .global_batch = options.global_batch,
                     .max_steps = options.max_steps,
                     .log_every = options.watch.log_every,
                     .max_seconds = progress.max_seconds(),
                     .flops_per_image =
                         3 * run.training.denoiser->shape().forward_flops,  // backward is twice the forward
                     .peak_flops = run.peak_flops * static_cast<double>(run.group->world_size()),
                     .sheet_flops = run.data_sheet_flops * static_cast<double>(run.group->world_size()),
                     .device = run.device,
                     .tensorboard = options.watch.tensorboard},
      progress.step);
}

// How well a rank's device is used: as the log's lines have it.
nlohmann::json arithmetic_of(const TrainingRun& run, double images_per_s) {
  const double flops = images_per_s * 3 * run.training.denoiser->shape().forward_flops /
                       static_cast<double>(run.group->world_size());
  nlohmann::json shares = {{"tflops", flops / 1e12}};
  if (run.peak_flops > 0) shares["peak_share"] = flops / run.peak_flops;
  if (run.data_sheet_flops > 0) shares["mfu"] = flops / run.data_sheet_flops;
  return shares;
}

}  // namespace

RunWatch::RunWatch(TrainingRun& run, const Progress& progress, nlohmann::json predicted,
                   const std::optional<TrainStateInfo>& resumed)
    : run_(run),
      progress_(progress),
      predicted_(std::move(predicted)),
      monitor_(make_monitor(run, progress)),
      measurement_(run.device, run.options.global_batch, *run.training.state, run.data.decoder.get(),
                   observers_) {
  if (monitor_) observers_.add(&monitor_->timers());
  if (monitor_ && resumed) resume(*resumed);
  if (!run.options.watch.profile.empty() && run.is_first()) profile();
  run.training.step->observe(&observers_);
}

void RunWatch::resume(const TrainStateInfo& saved) {
  monitor_->restore_window(saved.log_window);
  monitor_->event({{"event", "resume"}, {"step", saved.step}});
  fmt::print("resuming {} from step {} ({} images seen)\n", run_.options.out, saved.step, saved.images_seen);
}

void RunWatch::profile() {
  const StepRange steps = run_.options.watch.profile;
  StepProfiler::Options options{
      .steps = steps,
      .path = fmt::format("{}/profile-{}-{}.json", run_.options.out, steps.first, steps.last),
      .device = run_.device,
      .segments = {}};
  for (const auto& segment : run_.training.denoiser->segments()) options.segments.push_back(segment->name());
  profiler_ = std::make_unique<StepProfiler>(std::move(options));
  observers_.add(profiler_.get());
}

void RunWatch::log_step(const Step& step, const StepResult& result) {
  const int64_t batch = run_.options.global_batch, number = progress_.step;
  if (monitor_)
    monitor_->step({.step = number,
                    .images_seen = number * batch,
                    .lr = step.lr,
                    .train_seconds = progress_.seconds(),
                    .stall_seconds = step.stall_seconds,
                    .batches_ready = step.batches_ready,
                    .result = &result,
                    .positions = positions_at(*run_.training.objective, run_.options.seed,
                                              (number - 1) * batch, batch)});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - step.begin).count();
  measurement_.add(seconds, step.stall_seconds);
}

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

void RunWatch::evaluation(const nlohmann::json& result) {
  if (monitor_) monitor_->evaluation(progress_.step, result);
}

void RunWatch::compare_with_plan() {
  if (num_steps() == 0 || !run_.is_first()) return;
  StepFigures measured = measurement_.figures();
  measured.by_phase.insert(run_.phase_memory.peak_bytes().begin(), run_.phase_memory.peak_bytes().end());
  // What the plan foretells is the largest batch, which the steps so far need not have seen.
  if (const auto rehearsal = measured.by_phase.find("rehearsal"); rehearsal != measured.by_phase.end())
    measured.peak_bytes = std::max(measured.peak_bytes, rehearsal->second);
  nlohmann::json comparison = comparison_json(predicted_, measured);
  comparison.at("measured").update(arithmetic_of(run_, measured.images_per_s));
  write_file_atomically("plan", run_.options.out + "/plan.json", comparison.dump(1) + "\n");
  for (const auto& finding : comparison.at("findings")) fmt::print("plan: {}\n", finding.get<std::string>());
}

void RunWatch::finish() {
  if (profiler_) profiler_->finish();
}

}  // namespace kiln
