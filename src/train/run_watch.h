// Who watches a run: the monitor, the measurement beside the plan, the profiler. The loop of training tells
// them what happens; they decide nothing.
#pragma once
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/train_state.h"
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
  // from. REQUIRES: `run` is built; it and `progress` outlive this.
  RunWatch(TrainingRun& run, const Progress& progress, nlohmann::json predicted,
           const std::optional<TrainStateInfo>& resumed);

  // Calls run(), which takes the step of progress.step, and watches it from inside. Returns its result.
  template <class Run>
  StepResult watch_step(Run&& run) {
    if (profiler_) profiler_->begin_step(progress_.step);
    StepResult result = measurement_.measure(run);
    if (monitor_) monitor_->timers().end_step();
    if (profiler_) profiler_->end_step(progress_.step);
    return result;
  }
  // A step, as the loop saw it.
  struct Step {
    std::chrono::steady_clock::time_point begin;  // when its batch was asked for
    double lr = 0;
    double stall_seconds = 0;   // spent waiting for the loader
    int64_t batches_ready = 0;  // of the loader, when the batch was asked for
  };
  void log_step(const Step& step, const StepResult& result);
  int64_t num_steps() const { return measurement_.num_steps(); }  // of this process

  void loss_scale(double scale);
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
  void resume(const TrainStateInfo& saved);
  void profile();

  TrainingRun& run_;
  const Progress& progress_;
  nlohmann::json predicted_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;  // rank 0's
  StepMeasurement measurement_;
  std::unique_ptr<StepProfiler> profiler_;  // rank 0's
};

}  // namespace kiln
