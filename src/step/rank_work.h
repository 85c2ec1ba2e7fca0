// The part of a step whose work depends on the share of the training state that this rank keeps: ZeRO's
// calls, the norm of the gradients, the update. Observers hear of every call; a plan makes the calls of one
// rank's step again on the state of another (plan/ranks/rank_step.h).
#pragma once
#include "step/step_update.h"

namespace kiln {

class RankWork {
 public:
  // REQUIRES: `optimizer` and `state` outlive this.
  RankWork(const Optimizer& optimizer, TrainingState& state, at::Device device, EmaSchedule ema_schedule);
  void observe(StepObserver* observer);

  // Waits for the whole weights of a segment; those of the next one in `direction` follow while it computes.
  void gather(size_t segment, int direction);
  void release(size_t segment);
  // True: the gradients of this micro-step are added to those that are there.
  bool begin_gradients(size_t segment, bool first_micro_step);
  void reduce(size_t segment, bool first_micro_step, bool last_micro_step);
  void finish_reductions();
  // This rank's part of the sum over all gradients. f64 scalar on the device.
  at::Tensor gradient_sum_of_squares();
  // Where the optimizer's state is on a disk: begins to read it, once the last backward begins.
  void read_ahead();
  // Queues the update before the host knows what the step measured, where the optimizer can do with a scale
  // that only the device knows (ops::step_scale).
  void update_ahead(double lr, const at::Tensor& losses, const at::Tensor& sum_of_squares,
                    double max_grad_norm);
  // The update of a step that is applied, unless it went ahead. The caller counts it.
  void update(double lr, double grad_scale);

  // Makes `call` again. Returns what begin_gradients() answers, else false.
  bool repeat(const RankCall& call);

 private:
  Zero& zero() { return *state_.zero; }

  TrainingState& state_;
  at::Device device_;
  StepUpdate update_;
  bool updated_ahead_ = false;
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
