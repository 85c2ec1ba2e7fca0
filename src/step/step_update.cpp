#include "step/step_update.h"

#include <algorithm>
#include <utility>

#include "core/aten.h"
#include "core/dry_run.h"
#include "ops/update/stochastic_round.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

StepUpdate::StepUpdate(const Optimizer& optimizer, TrainingState& state, at::Device device,
                       EmaSchedule ema_schedule)
    : optimizer_(optimizer), state_(state), device_(device), ema_schedule_(ema_schedule) {
  if (!has_host_behind(device_) || state_.placement == Placement::kDevice) return;
  const FlatUnit* largest = &state_.segments.front().unit;
  for (const auto& segment : state_.segments)
    if (segment.unit.shard_size() > largest->shard_size()) largest = &segment.unit;
  exchange_.emplace(device_, largest->shard_size(), largest->grad_shard.scalar_type(),
                    largest->compute_weights.scalar_type());
  state_.offloaded.host += exchange_->host_bytes();
  if (largest->master_dtype() != at::kFloat)  // its f32 copy during the update
    state_.offloaded.host += largest->shard_size() * static_cast<int64_t>(sizeof(float));
}

void StepUpdate::read_ahead() {
  if (state_.placement != Placement::kNvme) return;
  const PhaseScope phase(observer_, StepPhase::kOffload);
  const size_t count = std::min(state_.segments.size(), state_.nvme->optimizer_state->buffers().size());
  for (size_t s = 0; s < count; ++s) state_.segments[s].unit.prefetch_state();
}

bool StepUpdate::runs_ahead() const {
  const auto is_here = [](const auto& segment) {
    return segment.unit.weight_placement() == Placement::kDevice;
  };
  const bool rounds = state_.segments.front().unit.master_dtype() != at::kFloat;  // the averages would move
  return optimizer_.reads_device_scale() && !rounds && state_.placement == Placement::kDevice &&
         std::ranges::all_of(state_.segments, is_here);
}

void StepUpdate::run(double lr, double grad_scale, const at::Tensor& device_scale) {
  at::NoGradGuard no_grad;
  const OptimizerStep step{
      .lr = lr, .update = state_.updates + 1, .grad_scale = grad_scale, .device_scale = device_scale};
  bring_state(0);
  for (size_t s = 0; s < state_.segments.size(); ++s) {
    bring_state(s + 1);
    if (state_.segments[s].unit.layout().size > 0) update_unit(s, step);
  }
  state_.zero->read_ahead();
}

// Begins to bring a segment's optimizer state from the disk and its gradients to the host.
void StepUpdate::bring_state(size_t segment) {
  if (state_.placement == Placement::kDevice || segment >= state_.segments.size()) return;
  const FlatUnit& unit = state_.segments[segment].unit;
  if (unit.layout().size == 0) return;
  const PhaseScope phase(observer_, StepPhase::kOffload, static_cast<int64_t>(segment));
  unit.prefetch_state();
  if (exchange_) exchange_->fetch(unit.grad_shard);
}

void StepUpdate::update_unit(size_t s, const OptimizerStep& step) {
  FlatUnit& unit = state_.segments[s].unit;
  const bool weights_elsewhere = unit.weight_placement() != Placement::kDevice;
  std::optional<PhaseScope> phase;
  if (state_.placement != Placement::kDevice || weights_elsewhere)
    phase.emplace(observer_, StepPhase::kOffload, static_cast<int64_t>(s));
  StateLease state = unit.lease(Access::kWrite);
  WeightLease home = unit.lease_weights(Access::kOverwrite);
  OptimizerSlice slice{.master = state.master,
                       .grads = exchange_ ? exchange_->take() : unit.grad_shard,
                       .moments = state.moments,
                       .layout = &unit.layout(),
                       .offset = unit.shard_offset()};
  std::optional<DryRunScope> on_host;
  if (unit.shard_size() < unit.size())
    slice.sum = [&](at::Tensor& values) {
      std::optional<DryRunScope> on_device;
      if (on_host) on_device.emplace(DryRunDevice::kCuda);
      state_.zero->sum_over_shards(values, "the optimizer's sums of " + unit.name());
    };
  // Weights that are updated on one side of the link and kept on the other have to cross it.
  const bool sends = exchange_ && !weights_elsewhere;
  const bool brings = !exchange_ && weights_elsewhere && has_host_behind(device_);
  at::Tensor weights = sends    ? exchange_->weights(unit.shard_size())
                       : brings ? at::empty({unit.shard_size()}, unit.compute_weights.options())
                                : home.shard;
  phase.reset();

  phase.emplace(observer_, StepPhase::kOptimizer, static_cast<int64_t>(s));
  std::vector<ops::EmaSlice> emas;
  for (size_t i = 0; i < state.emas.size(); ++i)
    emas.push_back({state.emas[i], ema_decay_at(ema_schedule_, state_.ema_decays[i], step.update)});
  const bool casts = weights.scalar_type() != state.master.scalar_type();
  if (casts) slice.compute_weights = &weights;
  const bool widens = state.master.scalar_type() != at::kFloat;
  // The master is f32 only during its unit's update. The averages follow its rounded value.
  if (widens)
    slice.master = exchange_ ? host_copy_in_f32(state.master, device_) : state.master.to(at::kFloat);
  if (exchange_) on_host.emplace(DryRunDevice::kCpu);  // the host of a GPU computes as any CPU does
  if (!widens) {
    slice.emas = std::move(emas);
    optimizer_.step(slice, step);
  } else {
    optimizer_.step(slice, step);
    ops::stochastic_round(slice.master, state.master,
                          {.seed = state_.seed,
                           .unit = static_cast<int64_t>(s),
                           .update = step.update,
                           .first = unit.shard_offset()});
    slice.emas = std::move(emas);
    slice.compute_weights = nullptr;
    if (!slice.emas.empty()) slice.master.copy_(state.master);
    slice.follow_master();
  }
  on_host.reset();
  if (!casts && !weights.is_same(state.master)) weights.copy_(state.master);
  if (sends) exchange_->send(home.shard);
  if (brings) home.shard.copy_(weights, /*non_blocking=*/unit.weight_placement() == Placement::kHost);
  state_.zero->publish(s);
}

}  // namespace kiln
