// Who watches a run: the monitor, the measurement beside the plan, the profiler. The loop of training tells
// them what happens; they decide nothing.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/train_state.h"
#include "data/loader/batch.h"
#include "train/bad_step.h"
#include "train/progress.h"
#include "train/sample_grid.h"
#include "train/training_run.h"
#include "watch/monitor.h"
#include "watch/observer_group.h"
#include "watch/profiler.h"
#include "watch/step_measurement.h"

namespace kiln {

class RunWatch {
 public:
  // `predicted`: a plan's figures, or null. `resumed`: what the checkpoint says that this process goes on
  // from; `is_next`: it made that itself, at the end of the stage before. `steps_ahead`: of the stages behind
  // this one, in the time of its steps. REQUIRES: `run` is built; it and `progress` outlive this.
  RunWatch(TrainingRun& run, const Progress& progress, nlohmann::json predicted,
           const std::optional<TrainStateInfo>& resumed, bool is_next = false, double steps_ahead = 0);

  // Calls run(), which takes the step of progress.step, and watches it from inside. Returns its result.
  template <class Run>
  StepResult watch_step(Run&& run) {
    if (profiler_) profiler_->begin_step(progress_.step);
    const bool is_audited = audits_next_step();
    if (is_audited) begin_audit();
    StepResult result = measurement_.measure(run);
    if (is_audited) end_audit();
    if (monitor_) monitor_->timers().end_step();
    if (profiler_) profiler_->end_step(progress_.step);
    return result;
  }
  // Calls run(), which rehearses the largest batch before the first step, and measures its memory.
  template <class Run>
  void watch_rehearsal(Run&& run) {
    measurement_.measure_rehearsal(run);
  }
  // A step, as the loop saw it.
  struct Step {
    std::chrono::steady_clock::time_point begin;  // when its batch was asked for
    double lr = 0;
    double stall_seconds = 0;    // spent waiting for the loader
    EncodingSeconds encoding{};  // of the batch
    int64_t batches_ready = 0;   // of the loader, when the batch was asked for
  };
  void log_step(const Step& step, const StepResult& result);
  int64_t num_steps() const { return measurement_.num_steps(); }  // of this process
  // Audits the precision of the first step that is steady. `ops`: null: of none.
  void audit_with(std::function<std::unique_ptr<OpSource>(at::Device)> ops) { audit_ops_ = std::move(ops); }

  void loss_scale(double scale);
  // What is so from the next step on: a line of log.jsonl that gets its "step".
  void stage_event(nlohmann::json event);
  void bad_step(const BadStepReport& report);
  void samples(const SampleGrid& grid);
  void validation(const ValidationLoss& loss);
  void evaluation(const nlohmann::json& result);  // as of kiln evaluate

  // While this lives, time is not training: it does not count in images/s.
  class Pause {
   public:
    explicit Pause(RunWatch& watch) : monitor_(watch.monitor_.get()) {
      if (monitor_) monitor_->pause();
    }
    ~Pause() {
      if (monitor_) monitor_->resume();
    }
    Pause(const Pause&) = delete;

   private:
    Monitor* monitor_;
  };
  // The steps since the last line of the log, for a checkpoint between two lines.
  nlohmann::json window() const { return monitor_ ? monitor_->window() : nlohmann::json(); }

  // Writes RUN/plan.json: what the plan said beside what was measured so far.
  void compare_with_plan();
  // After the last step: writes a trace that is being recorded.
  void finish();

 private:
  void resume(const TrainStateInfo& saved, bool is_next);
  void profile();
  bool audits_next_step() const { return audit_ops_ && run_.is_first() && num_steps() == kAuditedStep; }
  void begin_audit();
  void end_audit();

  static constexpr int64_t kAuditedStep = 2;  // from 0 on: those before warm up
  void add_groups(StepReport& report) const;

  TrainingRun& run_;
  const Progress& progress_;
  nlohmann::json predicted_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;  // rank 0's
  StepMeasurement measurement_;
  std::unique_ptr<StepProfiler> profiler_;  // rank 0's
  std::function<std::unique_ptr<OpSource>(at::Device)> audit_ops_;
  std::unique_ptr<OpSource> audited_ops_;  // during the audited step
  std::unique_ptr<SpanRecorder> audited_;  // likewise
};

}  // namespace kiln
