// The part of a step whose work depends on this rank's share of the training state: ZeRO's calls, the norm of
// the gradients, the update. Observers hear of every call. A plan repeats the calls of one rank's step on the
// state of another rank (plan/ranks/rank_step.h).
#pragma once
#include "step/step_update.h"

namespace kiln {

class RankWork {
 public:
  // `update_beside`: as StepUpdate has it. REQUIRES: `optimizer` and `state` outlive this.
  RankWork(const Optimizer& optimizer, TrainingState& state, at::Device device, EmaSchedule ema_schedule,
           std::optional<at::Device> update_beside = std::nullopt);
  void observe(StepObserver* observer);

  // Waits for the update of a segment, where that runs beside the compute, and for its whole weights. While
  // it computes, the weights of the next segment in `direction` are gathered.
  void gather(size_t segment, int direction);
  void release(size_t segment);
  // Returns true if the gradients of this micro-step are added to existing ones.
  bool begin_gradients(size_t segment, bool first_micro_step);
  void reduce(size_t segment, bool first_micro_step, bool last_micro_step);
  void finish_reductions();
  // Returns this rank's part of the sum of squares of all gradients, an f64 scalar on the device.
  at::Tensor gradient_sum_of_squares();
  // Begins to read optimizer state that is on a disk. Called once the last backward begins.
  void read_ahead();
  // Queues the update before the host has read what the step measured. Does nothing unless the optimizer can
  // use a scale that only the device knows (ops::step_scale).
  void update_ahead(double lr, const at::Tensor& losses, const at::Tensor& sum_of_squares,
                    double max_grad_norm);
  // Runs the update of a step that is applied, unless update_ahead() already did. The caller counts it.
  void update(double lr, double grad_scale);

  // Repeats `call`. Returns what begin_gradients() returns, or false for other calls.
  bool repeat(const RankCall& call);

 private:
  TrainingState& state_;
  at::Device device_;
  StepUpdate update_;
  bool updated_ahead_ = false;
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
