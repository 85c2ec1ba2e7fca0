// Watches a run with the monitor, the measurement beside the plan and the profiler. The training loop tells
// it what happens; it decides nothing.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "checkpoint/train_state.h"
#include "core/json.h"
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
  // `predicted` are a plan's figures, or null. `resumed` is the state of the checkpoint that this process
  // resumes from; `is_next` is true if this process wrote it itself, at the end of the stage before.
  // `steps_ahead` is the length of the later stages, in steps of this one. REQUIRES: `run` is built; it and
  // `progress` outlive this.
  RunWatch(TrainingRun& run, const Progress& progress, nlohmann::json predicted,
           const std::optional<TrainStateInfo>& resumed, bool is_next = false, double steps_ahead = 0);

  // Calls run(), which takes step progress.step, and watches it from inside. Returns its result.
  template <class Run>
  StepResult watch_step(Run&& run) {
    if (profiler_) profiler_->begin_step(progress_.step);
    const bool is_audited = audits_next_step(), is_timed = times_next_step();
    if (is_audited || is_timed) begin_recording(/*checks_values=*/is_audited);
    StepResult result = measurement_.measure(run);
    if (is_audited) end_audit();
    if (is_timed) on_timed_operations_(ops_of(end_recording().spans));
    if (monitor_) monitor_->timers().end_step();
    if (profiler_) end_profiled_step();
    return result;
  }
  // Calls run(), which rehearses the largest batch before the first step, and measures its memory.
  template <class Run>
  void watch_rehearsal(Run&& run) {
    measurement_.measure_rehearsal(run);
  }
  // What the loop knows of a step.
  struct Step {
    std::chrono::steady_clock::time_point begin;  // when its batch was asked for
    double lr = 0;
    double stall_seconds = 0;    // waiting for the loader
    EncodingSeconds encoding{};  // of the batch
    int64_t batches_ready = 0;   // in the loader, when the batch was asked for
    double flops = 0;            // of all ranks, without recomputation
  };
  void log_step(const Step& step, const StepResult& result);
  int64_t num_steps() const { return measurement_.num_steps(); }  // of this process
  // Audits the precision of the first steady step.
  void audit() { audits_ = true; }
  // Times the operations of the second step and hands them over.
  void time_operations(std::function<void(std::vector<OpRecord>)> take) {
    on_timed_operations_ = std::move(take);
  }

  void loss_scale(double scale);
  // Logs what holds from the next step on, as a line of log.jsonl. Adds its "step".
  void stage_event(nlohmann::json event);
  void bad_step(const BadStepReport& report);
  void samples(const SampleGrid& grid);
  void validation(const ValidationLoss& loss);
  void evaluation(const nlohmann::json& result);  // as kiln evaluate gives it

  // While this lives, time does not count as training, nor in images/s.
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
  // Returns the steps since the last line of the log, for a checkpoint between two lines.
  nlohmann::json window() const { return monitor_ ? monitor_->window() : nlohmann::json(); }

  // The last checkpoint stopped training for so long; what follows of its writing goes on beside the steps.
  void checkpoint_pause(double seconds) { checkpoint_pause_s_ = seconds; }

  // Writes RUN/report.html.
  void write_report();
  // Writes RUN/plan.json with the plan's figures beside what was measured so far. Every rank calls it.
  void compare_with_plan();
  // Writes a trace that is still being recorded. Called after the last step.
  void finish();

 private:
  void resume(const TrainStateInfo& saved, bool is_next);
  void profile();
  StepFigures measured_figures();
  bool audits_next_step() const { return audits_ && run_.is_first() && num_steps() == kAuditedStep; }
  bool times_next_step() const {
    return on_timed_operations_ && run_.is_first() && num_steps() == kTimedStep;
  }
  void end_profiled_step();
  void begin_recording(bool checks_values);
  RecordedStep end_recording();
  void end_audit();

  static constexpr int64_t kTimedStep = 1, kAuditedStep = 2;  // counted from 0; the first two are warm-up
  void add_groups(StepReport& report) const;

  TrainingRun& run_;
  const Progress& progress_;
  nlohmann::json predicted_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;  // rank 0's
  StepMeasurement measurement_;
  double flops_ = 0;                        // of all measured steps
  double checkpoint_pause_s_ = 0;           // of the last checkpoint; 0: there was none
  std::unique_ptr<StepProfiler> profiler_;  // rank 0's
  bool audits_ = false;
  std::function<void(std::vector<OpRecord>)> on_timed_operations_;
  std::unique_ptr<OpRecorder> recorded_ops_;  // during a step whose operations are timed
  std::unique_ptr<SpanRecorder> recorded_;    // likewise
};

}  // namespace kiln
