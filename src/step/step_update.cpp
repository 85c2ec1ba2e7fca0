#include "step/step_update.h"

#include <algorithm>
#include <utility>

#include "core/aten.h"
#include "core/dry_run.h"
#include "ops/update/stochastic_round.h"
#include "optim/optimizer.h"
#include "parallel/offload/host_memory.h"
#include "step/training_state.h"

namespace kiln {

StepUpdate::StepUpdate(const Optimizer& optimizer, TrainingState& state, EmaSchedule ema_schedule,
                       std::optional<at::Device> beside)
    : optimizer_(optimizer), state_(state), ema_schedule_(ema_schedule) {
  if (beside && state_.placement.is_on_device()) beside_.emplace(*beside);
  if (!state_.placement.updates_on_host()) return;
  const FlatUnit* largest = &state_.segments.front().unit;
  for (const auto& segment : state_.segments)
    if (segment.unit.shard_size() > largest->shard_size()) largest = &segment.unit;
  exchange_.emplace(largest->compute_weights.device(), largest->shard_size(),
                    largest->grad_shard.scalar_type(), largest->compute_weights.scalar_type());
  state_.offloaded.host += exchange_->host_bytes();
  if (largest->master_dtype() != at::kFloat)  // its f32 copy during the update
    state_.offloaded.host += largest->shard_size() * static_cast<int64_t>(sizeof(float));
}

void StepUpdate::read_ahead() {
  if (state_.placement.optimizer != Placement::kNvme) return;
  const PhaseScope phase(observer_, StepPhase::kOffload);
  const size_t count = std::min(state_.segments.size(), state_.nvme->optimizer_state->buffers().size());
  for (size_t s = 0; s < count; ++s) state_.segments[s].unit.prefetch_state();
}

bool StepUpdate::runs_ahead() const {
  const auto is_here = [](const auto& segment) { return segment.unit.placement().is_on_device(); };
  const bool rounds = state_.segments.front().unit.master_dtype() != at::kFloat;  // the averages would move
  return optimizer_.reads_device_scale() && !rounds && std::ranges::all_of(state_.segments, is_here);
}

void StepUpdate::run(double lr, double grad_scale, const at::Tensor& device_scale) {
  at::NoGradGuard no_grad;
  const OptimizerStep step{
      .lr = lr, .update = state_.updates + 1, .grad_scale = grad_scale, .device_scale = device_scale};
  if (beside_) scale_ = device_scale;
  bring_state(0);
  for (size_t s = 0; s < state_.segments.size(); ++s) {
    bring_state(s + 1);
    if (state_.segments[s].unit.layout().size == 0) continue;
    if (beside_)
      state_.zero->changes_until(s, beside_->run([&] { update_unit(s, step); }));
    else
      update_unit(s, step);
  }
  state_.zero->read_ahead();
}

// Begins to bring a segment's optimizer state from the disk and its gradients to the host.
void StepUpdate::bring_state(size_t segment) {
  if (state_.placement.optimizer == Placement::kDevice || segment >= state_.segments.size()) return;
  const FlatUnit& unit = state_.segments[segment].unit;
  if (unit.layout().size == 0) return;
  const PhaseScope phase(observer_, StepPhase::kOffload, state_.segment_of(segment));
  unit.prefetch_state();
  if (exchange_) exchange_->fetch(unit.grad_shard);
}

// Updates a unit where its optimizer state is. New weights cross the link if they are kept on its other side.
void StepUpdate::update_unit(size_t s, const OptimizerStep& step) {
  FlatUnit& unit = state_.segments[s].unit;
  const StatePlacement& placement = unit.placement();
  const bool on_host = placement.updates_on_host(), crosses = on_host != placement.gathers_from_host();
  std::optional<PhaseScope> phase;
  if (!placement.is_on_device()) phase.emplace(observer_, StepPhase::kOffload, state_.segment_of(s));
  StateLease state = unit.lease(Access::kWrite);
  WeightLease home = unit.lease_weights(Access::kOverwrite);
  OptimizerSlice slice{.master = state.master,
                       .grads = on_host ? exchange_->take() : unit.grad_shard,
                       .moments = state.moments,
                       .layout = &unit.layout(),
                       .offset = unit.shard_offset()};
  if (unit.shard_size() < unit.size())
    slice.sum = [&](at::Tensor& values) {
      std::optional<DryRunScope> on_device;
      if (on_host) on_device.emplace(DryRunDevice::kCuda);
      state_.zero->sum_over_shards(values, "the optimizer's sums of " + unit.name());
    };
  at::Tensor weights = !crosses  ? home.shard
                       : on_host ? exchange_->weights(unit.shard_size())
                                 : at::empty({unit.shard_size()}, unit.compute_weights.options());

  phase.emplace(observer_, StepPhase::kOptimizer, state_.segment_of(s));
  for (size_t i = 0; i < state.emas.size(); ++i)
    slice.emas.push_back({state.emas[i], ema_decay_at(ema_schedule_, state_.ema_decays[i], step.update)});
  const bool casts = weights.scalar_type() != state.master.scalar_type();
  if (casts) slice.compute_weights = &weights;
  step_master(s, slice, step);
  if (!casts && !weights.is_same(state.master)) weights.copy_(state.master);
  if (crosses && on_host) exchange_->send(home.shard);
  if (crosses && !on_host) home.shard.copy_(weights, /*non_blocking=*/placement.params == Placement::kHost);
  state_.zero->publish(s);
}

// Moves the master of a unit and what follows it. A bf16 master is f32 only meanwhile, in `slice`; averages
// follow its rounded value, and the weights that compute are bf16 too.
void StepUpdate::step_master(size_t s, OptimizerSlice& slice, const OptimizerStep& step) {
  const FlatUnit& unit = state_.segments[s].unit;
  const bool on_host = unit.placement().updates_on_host(), rounds = unit.master_dtype() != at::kFloat;
  const at::Tensor master = slice.master;
  if (rounds)
    slice.master = on_host ? host_copy_in_f32(master, unit.compute_weights.device()) : master.to(at::kFloat);
  std::optional<DryRunScope> as_cpu;
  if (on_host) as_cpu.emplace(DryRunDevice::kCpu);  // the host of a GPU computes as any CPU does
  if (!rounds) return optimizer_.step(slice, step);
  std::vector<ops::EmaSlice> emas = std::exchange(slice.emas, {});
  optimizer_.step(slice, step);
  ops::stochastic_round(
      slice.master, master,
      {.seed = state_.seed, .unit = static_cast<int64_t>(s), .update = step.update, .first = slice.offset});
  slice.emas = std::move(emas);
  if (!slice.emas.empty()) slice.master.copy_(master);
  slice.follow_master();
}

}  // namespace kiln
