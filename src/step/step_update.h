// The update of a step, which moves weights, moments and EMAs unit by unit, wherever they are kept.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "optim/ema.h"
#include "parallel/offload/host_exchange.h"
#include "parallel/offload/side_stream.h"
#include "step/step_observer.h"

namespace kiln {

class Optimizer;
class TrainingState;
struct OptimizerSlice;
struct OptimizerStep;

class StepUpdate {
 public:
  // `beside`: a device, on a stream of whose own the update runs if all state is there; none: it runs among
  // the compute. REQUIRES: `optimizer` and `state` outlive this.
  StepUpdate(const Optimizer& optimizer, TrainingState& state, EmaSchedule ema_schedule,
             std::optional<at::Device> beside);
  void observe(StepObserver* observer) { observer_ = observer; }

  // Called once the last backward begins. While it computes, the disk brings the state that the update begins
  // with. A skipped step leaves that in the buffers for the next step.
  void read_ahead();
  // True if run() can use a scale that only the device knows, that is, if everything that moves is on the
  // device.
  bool runs_ahead() const;
  // Moves all units by the gradients times `grad_scale`, or times `device_scale` if that is defined: 0-d f32
  // on the device, NaN where nothing is to move. State on the host or a disk is brought one segment ahead. An
  // update on its own stream ends unit by unit (Zero::changes_until). The caller counts the update.
  void run(double lr, double grad_scale, const at::Tensor& device_scale = {});

 private:
  void bring_state(size_t segment);
  void update_unit(size_t segment, const OptimizerStep& step);
  void step_master(size_t segment, OptimizerSlice& slice, const OptimizerStep& step);

  const Optimizer& optimizer_;
  TrainingState& state_;
  EmaSchedule ema_schedule_;
  std::optional<HostExchange> exchange_;  // if the update is on the host of a device
  std::optional<SideStream> beside_;      // if it runs beside the compute
  at::Tensor scale_;                      // read there while the next step computes
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
