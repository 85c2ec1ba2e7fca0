// Who watches a run: the monitor, the measurement beside the plan, the profiler. They are told of every step,
// and of nothing else does the loop of training know them.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/train_state.h"
#include "train/bad_step.h"
#include "train/monitor.h"
#include "train/observer_group.h"
#include "train/profiler.h"
#include "train/run_progress.h"
#include "train/sample_grid.h"
#include "train/step_measurement.h"
#include "train/training_run.h"

namespace kiln {

class RunWatch {
 public:
  // `predicted`: a plan's figures, or null. `resumed`: what the checkpoint says that this process goes on
  // from. REQUIRES: `run` is built; it and `progress` outlive this.
  RunWatch(TrainingRun& run, const RunProgress& progress, nlohmann::json predicted,
           const std::optional<TrainStateInfo>& resumed);

  // Around each step, in this order.
  void before_batch();  // is asked for
  void before_step();
  void after_step();
  // Logs it; `batches_ready`: of the loader, when this step asked for one.
  void log_step(const StepResult& result, double lr, double stall_seconds, int64_t batches_ready);
  void end_step(double stall_seconds);
  int64_t num_steps() const { return measurement_.num_steps(); }  // of this process

  // Instead of, or after, the line of a step.
  void loss_scale(double scale);
  void bad_step(const BadStepReport& report);
  void samples(const SampleGrid& grid);
  void validation(const ValidationLoss& loss);

  // While this lives, time that is not training: it does not count in images/s.
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
  // For a checkpoint between two lines of the log.
  nlohmann::json window() const { return monitor_ ? monitor_->window() : nlohmann::json(); }

  // RUN/plan.json: what the plan said beside what was measured so far.
  void compare_with_plan();
  // After the last step: a trace that is being recorded is written.
  void finish();

 private:
  void resume(const TrainStateInfo& saved);
  void profile();

  TrainingRun& run_;
  const RunProgress& progress_;
  nlohmann::json predicted_;
  ObserverGroup observers_;
  std::unique_ptr<Monitor> monitor_;  // rank 0's
  StepMeasurement measurement_;
  std::unique_ptr<StepProfiler> profiler_;  // rank 0's
};

}  // namespace kiln
