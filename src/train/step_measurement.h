// What the steps of a run need and how long they take: the measured side of plan.json.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "train/memory_recorder.h"
#include "train/observer_group.h"
#include "train/phase_timers.h"
#include "train/prediction.h"
#include "train/training_state.h"

namespace kiln {

// Memory is measured in the first two steps: on a CPU every allocation (needs
// install_tracking_cpu_allocator), on a GPU the peak that its allocator counts. The second one is a steady
// step.
class StepMeasurement {
 public:
  // `autoencoder`: that the run has loaded, or null. REQUIRES: it, `state` and `observers` outlive this.
  StepMeasurement(at::Device device, int64_t global_batch, const TrainingState& state,
                  const Autoencoder* autoencoder, ObserverGroup& observers);
  ~StepMeasurement();
  StepMeasurement(const StepMeasurement&) = delete;

  void begin_step();  // before the batch is asked for
  void begin_run();   // before TrainStep::run()
  void end_run();     // after it
  void end_step(double stall_seconds);

  int64_t num_steps() const { return static_cast<int64_t>(step_seconds_.size()); }
  StepFigures figures();

 private:
  using Clock = std::chrono::steady_clock;
  void take_memory();
  std::map<std::string, int64_t> state_bytes() const;

  at::Device device_;
  int64_t global_batch_;
  const TrainingState& state_;
  const Autoencoder* autoencoder_;
  ObserverGroup& observers_;
  PhaseTimers timers_;
  std::unique_ptr<MemoryRecorder> recorder_;  // in a step whose memory is measured
  Clock::time_point begin_{};
  std::vector<double> step_seconds_, stall_seconds_;
  PhaseSeconds phase_seconds_{};  // of the steady steps
  StepFigures memory_;            // the fields about memory
};

}  // namespace kiln
