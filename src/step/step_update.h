// The update of a step: weights, moments and EMAs move, unit by unit, wherever they are kept.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "optim/ema.h"
#include "optim/optimizer.h"
#include "parallel/offload/host_exchange.h"
#include "step/step_observer.h"
#include "step/training_state.h"

namespace kiln {

class StepUpdate {
 public:
  // REQUIRES: `optimizer` and `state` outlive this.
  StepUpdate(const Optimizer& optimizer, TrainingState& state, at::Device device, EmaSchedule ema_schedule);
  void observe(StepObserver* observer) { observer_ = observer; }

  // Once the last backward begins: while it computes, the disk brings what the update begins with. A step
  // that is skipped leaves it in the buffers for the next one.
  void read_ahead();
  // Whether run() can do with a scale that only the device knows: where all that moves is on it.
  bool runs_ahead() const;
  // Moves all units by the gradients times `grad_scale`, or, where it is defined, times `device_scale`: 0-d
  // f32 on the device, NaN where nothing is to move. What is on the host or a disk comes one segment ahead.
  // The caller counts the update.
  void run(double lr, double grad_scale, const at::Tensor& device_scale = {});

 private:
  void bring_state(size_t segment);
  void update_unit(size_t segment, const OptimizerStep& step);

  const Optimizer& optimizer_;
  TrainingState& state_;
  at::Device device_;
  EmaSchedule ema_schedule_;
  std::optional<HostExchange> exchange_;  // of an optimizer whose state is on the host of a device
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
