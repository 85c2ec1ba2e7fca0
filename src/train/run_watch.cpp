#include "train/run_watch.h"

#include <algorithm>
#include <utility>

#include "core/files/atomic_file.h"
#include "core/memory_limits.h"
#include "step/step_batch.h"
#include "watch/precision_audit.h"
#include "watch/report.h"

namespace kiln {

namespace {

// Returns the names of several sources; a single source needs no name.
std::vector<std::string> source_names(const std::vector<SampleSource>& sources) {
  std::vector<std::string> names;
  if (sources.size() > 1)
    for (const SampleSource& source : sources) names.push_back(source.name);
  return names;
}

std::vector<std::string> bucket_names(const std::vector<Lane>& lanes) {
  std::vector<std::string> names;
  if (lanes.size() > 1)
    for (const Lane& lane : lanes) names.push_back(fmt::format("{} x {}", lane.height, lane.width));
  return names;
}

// Returns a monitor on rank 0 and null on the others.
std::unique_ptr<Monitor> make_monitor(const TrainingRun& run, const Progress& progress, double steps_ahead) {
  if (!run.is_first()) return nullptr;
  const TrainOptions& options = run.options;
  return std::make_unique<Monitor>(
      MonitorOptions{.run = options.out,
                     .global_batch = options.global_batch,
                     .max_steps = options.max_steps,
                     .log_every = options.watch.log_every,
                     .steps_ahead = steps_ahead,
                     .max_seconds = progress.max_seconds(),
                     .peak_flops = run.peak_flops * static_cast<double>(run.group->world_size()),
                     .sheet_flops = run.data_sheet_flops * static_cast<double>(run.group->world_size()),
                     .device = run.device,
                     .num_gpus = run.group->ranks().local_world_size,
                     .tensorboard = options.watch.tensorboard,
                     .terms = run.training.objective->term_names(),
                     .sources = source_names(run.data.sources),
                     .buckets = bucket_names(run.data.shape.lanes)},
      progress.step);
}

// Returns how well a rank's device is used, with the keys of the log's lines. `flops` are of all ranks in a
// second.
nlohmann::json arithmetic_of(const TrainingRun& run, double flops) {
  flops /= static_cast<double>(run.group->world_size());
  nlohmann::json shares = {{"tflops", flops / 1e12}};
  if (run.peak_flops > 0) shares["peak_share"] = flops / run.peak_flops;
  if (run.data_sheet_flops > 0) shares["mfu"] = flops / run.data_sheet_flops;
  return shares;
}

}  // namespace

RunWatch::RunWatch(TrainingRun& run, const Progress& progress, nlohmann::json predicted,
                   const std::optional<TrainStateInfo>& resumed, bool is_next, double steps_ahead)
    : run_(run),
      progress_(progress),
      predicted_(std::move(predicted)),
      monitor_(make_monitor(run, progress, steps_ahead)),
      measurement_(run.device, run.options.global_batch, *run.training.state, run.data.decoder.get(),
                   observers_) {
  const auto count = [&](const std::vector<at::Tensor>& tensors, MemoryKind kind) {
    measurement_.count(tensors, kind);
    run.phase_memory.count_mapped(tensors);
  };
  if (run.evaluation) count(run.evaluation->tensors(), MemoryKind::kFeatureNet);
  if (run.data.captions) count(run.data.captions->encoder()->weights(), MemoryKind::kTextEncoder);
  if (monitor_) observers_.add(&monitor_->timers());
  if (monitor_ && resumed) resume(*resumed, is_next);
  if (!run.options.watch.profile.empty() && run.is_first()) profile();
  run.training.step->observe(&observers_);
}

void RunWatch::resume(const TrainStateInfo& saved, bool is_next) {
  if (progress_.stage_step() > 0) monitor_->restore_window(saved.log_window);  // not that of another stage
  if (is_next) return;
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
  if (monitor_) {
    StepReport report{
        .step = number,
        .is_last = progress_.finished(),
        .images_seen = number * batch,
        .lr = step.lr,
        .train_seconds = progress_.seconds(),
        .stall_seconds = step.stall_seconds,
        .encoding_s = {step.encoding.pictures, step.encoding.captions},
        .batches_ready = step.batches_ready,
        .flops = step.flops,
        .result = &result,
        .positions = positions_at(*run_.training.objective, run_.options.seed, (number - 1) * batch, batch)};
    add_groups(report);
    monitor_->step(report);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - step.begin).count();
  flops_ += step.flops;
  measurement_.add(seconds, step.stall_seconds, {step.encoding.pictures, step.encoding.captions});
}

// Adds the source of each row, and the bucket of the batch.
void RunWatch::add_groups(StepReport& report) const {
  const SampleOrder& order = run_.batches->order();
  const int64_t batch = run_.options.global_batch, first = (report.step - 1) * batch;
  if (run_.data.shape.lanes.size() > 1) report.bucket = order.batch_at(first).lane;
  const std::vector<SampleSource>& sources = run_.data.sources;
  if (sources.size() < 2) return;
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t sample = order.sample_at(first + row);
    const auto after = std::ranges::upper_bound(sources, sample, {}, &SampleSource::first);
    report.sources.push_back(after - sources.begin() - 1);
  }
}

void RunWatch::stage_event(nlohmann::json event) {
  if (!monitor_) return;
  event["step"] = progress_.step + 1;
  monitor_->event(event);
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
  monitor_->by_products().try_to_write("a grid of samples", [&] {
    fmt::print("samples {}\n", write_sample_grid(run_.options.out, progress_.step, grid));
  });
  monitor_->image("samples", grid.png, grid.height, grid.width, progress_.step);
}

void RunWatch::validation(const ValidationLoss& loss) {
  if (monitor_) monitor_->validation(progress_.step, loss, run_.validation->weights());
}

void RunWatch::evaluation(const nlohmann::json& result) {
  if (monitor_) monitor_->evaluation(progress_.step, result);
}

// Returns what the last rank measured: no rank has more images, and the plan is of such a rank. For phases
// outside of the step it returns the larger peak of this rank and that one. A collective.
StepFigures RunWatch::measured_figures() {
  StepFigures figures = measurement_.figures();
  figures.by_phase.merge(run_.phase_memory.peak_bytes());
  ProcessGroup& group = *run_.group;
  if (run_.options.global_batch % group.world_size() == 0) return figures;  // every rank has as many
  const bool is_last = group.rank() == group.world_size() - 1;
  const std::string sent = is_last ? to_json(figures).dump() : "";
  StepFigures last = figures_from_json(nlohmann::json::parse(group.gather(sent, "the measurements").back()));
  for (const auto& [phase, bytes] : run_.phase_memory.peak_bytes())
    last.by_phase[phase] = std::max(last.by_phase[phase], bytes);
  return last;
}

void RunWatch::compare_with_plan() {
  if (num_steps() == 0) return;
  const StepFigures measured = measured_figures();
  if (!run_.is_first()) return;
  nlohmann::json comparison = comparison_json(predicted_, measured);
  const double flops_of_step = flops_ / static_cast<double>(num_steps());
  comparison.at("measured").update(arithmetic_of(run_, flops_of_step / measured.step_s));
  if (checkpoint_pause_s_ > 0) comparison.at("measured")["checkpoint_pause_s"] = checkpoint_pause_s_;
  monitor_->by_products().try_to_write("plan.json", [&] {
    write_file_atomically("plan", run_.options.out + "/plan.json", comparison.dump(1) + "\n");
  });
  for (const auto& finding : comparison.at("findings")) fmt::print("plan: {}\n", finding.get<std::string>());
}

void RunWatch::begin_recording(bool checks_values) {
  recorded_ops_ = std::make_unique<OpRecorder>(
      OpRecorder::Options{.timed = true, .checks_values = checks_values, .device = run_.device});
  recorded_ = std::make_unique<SpanRecorder>(recorded_ops_.get());
  observers_.add(recorded_.get());
}

RecordedStep RunWatch::end_recording() {
  observers_.remove(recorded_.get());
  RecordedStep recorded = std::exchange(recorded_, nullptr)->finish();
  recorded_ops_.reset();
  return recorded;
}

void RunWatch::end_audit() {
  const RecordedStep recorded = end_recording();
  PrecisionContext context{.compute_dtype = run_.compute_dtype};
  for (const auto& segment : run_.training.denoiser->segments()) context.segments.push_back(segment->name());
  monitor_->by_products().try_to_write("precision.json", [&] {
    write_file_atomically("audit", run_.options.out + "/precision.json",
                          audit_precision(recorded.spans, context).dump(1) + "\n");
  });
}

void RunWatch::end_profiled_step() {
  monitor_->by_products().try_to_write("the profile", [&] { profiler_->end_step(progress_.step); });
}

void RunWatch::write_report() {
  if (!monitor_) return;
  monitor_->by_products().try_to_write("report.html", [&] { kiln::write_report(run_.options.out); });
  trim_small_blocks();
}

void RunWatch::finish() {
  if (profiler_) monitor_->by_products().try_to_write("the profile", [&] { profiler_->finish(); });
}

}  // namespace kiln
