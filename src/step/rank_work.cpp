#include "step/rank_work.h"

#include <ATen/ops/_efficientzerotensor.h>

#include <utility>

#include "core/aten.h"
#include "ops/ops.h"
#include "step/step_result.h"
#include "step/training_state.h"

namespace kiln {

namespace {

using Kind = RankCall::Kind;

// Announces a call to `observer` for as long as this lives. A null observer hears nothing.
class CallScope {
 public:
  CallScope(StepObserver* observer, const RankCall& made) : call(made), observer_(observer) {
    if (observer_) observer_->begin_call(call);
  }
  ~CallScope() {
    if (observer_) observer_->end_call(call);
  }
  CallScope(const CallScope&) = delete;

  RankCall call;

 private:
  StepObserver* observer_;
};

}  // namespace

RankWork::RankWork(const Optimizer& optimizer, TrainingState& state, at::Device device,
                   EmaSchedule ema_schedule, std::optional<at::Device> update_beside)
    : state_(state), device_(device), update_(optimizer, state, ema_schedule, update_beside) {}

void RankWork::observe(StepObserver* observer) {
  observer_ = observer;
  update_.observe(observer);
}

void RankWork::gather(size_t segment, int direction) {
  const CallScope call(observer_, {.kind = Kind::kGather, .segment = segment, .direction = direction});
  if (state_.zero->is_changing(segment)) {
    const PhaseScope phase(observer_, StepPhase::kOptimizer, state_.segment_of(segment));
    state_.zero->wait_for_change(segment);
  }
  if (state_.zero->idle()) return;
  const PhaseScope phase(observer_, StepPhase::kCommunication, state_.segment_of(segment));
  state_.zero->gather(segment, direction);
}

void RankWork::release(size_t segment) {
  const CallScope call(observer_, {.kind = Kind::kRelease, .segment = segment});
  state_.zero->release(segment);
}

bool RankWork::begin_gradients(size_t segment, bool first_micro_step) {
  CallScope call(observer_,
                 {.kind = Kind::kBeginGradients, .segment = segment, .first_micro_step = first_micro_step});
  return call.call.adds = state_.zero->begin_gradients(segment, first_micro_step);
}

void RankWork::reduce(size_t segment, bool first_micro_step, bool last_micro_step) {
  const CallScope call(observer_, {.kind = Kind::kReduce,
                                   .segment = segment,
                                   .first_micro_step = first_micro_step,
                                   .last_micro_step = last_micro_step});
  if (state_.zero->idle()) return;
  const PhaseScope phase(observer_, StepPhase::kCommunication, state_.segment_of(segment));
  const at::NoGradGuard no_grad;
  state_.zero->reduce(segment, first_micro_step, last_micro_step);
}

void RankWork::finish_reductions() {
  const CallScope call(observer_, {.kind = Kind::kFinishReductions});
  if (state_.zero->idle()) return;
  const PhaseScope phase(observer_, StepPhase::kCommunication);
  const at::NoGradGuard no_grad;
  state_.zero->finish_reductions();
}

at::Tensor RankWork::gradient_sum_of_squares() {
  const CallScope call(observer_, {.kind = Kind::kSumOfSquares});
  return kiln::gradient_sum_of_squares(state_, device_);
}

void RankWork::read_ahead() {
  const CallScope call(observer_, {.kind = Kind::kReadAhead});
  update_.read_ahead();
}

void RankWork::update_ahead(double lr, const at::Tensor& losses, const at::Tensor& sum_of_squares,
                            double max_grad_norm) {
  const CallScope call(observer_, {.kind = Kind::kUpdateAhead, .num_losses = losses.numel()});
  updated_ahead_ = update_.runs_ahead();
  if (!updated_ahead_) return;
  at::Tensor scale;
  {
    const PhaseScope phase(observer_, StepPhase::kGradNorm);
    scale = ops::step_scale(sum_of_squares, losses, max_grad_norm, state_.loss_scaler.scale());
  }
  update_.run(lr, /*grad_scale=*/1, scale);
}

void RankWork::update(double lr, double grad_scale) {
  const CallScope call(observer_, {.kind = Kind::kUpdate});
  if (!std::exchange(updated_ahead_, false)) update_.run(lr, grad_scale);
}

bool RankWork::repeat(const RankCall& call) {
  switch (call.kind) {
    case Kind::kGather:
      gather(call.segment, call.direction);
      return false;
    case Kind::kRelease:
      release(call.segment);
      return false;
    case Kind::kBeginGradients:
      return begin_gradients(call.segment, call.first_micro_step);
    case Kind::kReduce:
      reduce(call.segment, call.first_micro_step, call.last_micro_step);
      return false;
    case Kind::kFinishReductions:
      finish_reductions();
      return false;
    case Kind::kSumOfSquares:
      gradient_sum_of_squares();
      return false;
    case Kind::kReadAhead:
      read_ahead();
      return false;
    case Kind::kUpdateAhead: {
      // Stand-ins for the step's numbers, which exist by then. They take no memory.
      const auto number = at::TensorOptions(device_).dtype(at::kDouble);
      update_ahead(/*lr=*/0, at::_efficientzerotensor({call.num_losses}, number),
                   at::_efficientzerotensor({}, number), /*max_grad_norm=*/0);
      return false;
    }
    case Kind::kUpdate:
      update(/*lr=*/0, /*grad_scale=*/1);
      return false;
  }
  return false;
}

}  // namespace kiln
