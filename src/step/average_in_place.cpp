#include "step/average_in_place.h"

#include <algorithm>

#include "core/aten.h"

namespace kiln {

namespace {

constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

void swap_contents(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t begin = 0; begin < a.numel(); begin += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, a.numel() - begin);
    const at::Tensor part_a = a.narrow(0, begin, count), part_b = b.narrow(0, begin, count);
    const at::Tensor kept = part_a.clone();
    part_a.copy_(part_b);
    part_b.copy_(kept);
  }
}

// The optimizer's weights are those that compute.
bool computes_with_master(const FlatUnit& unit) {
  return unit.master.defined() && unit.master.is_same(unit.weight_shard);
}

void use_ema(FlatUnit& unit) {
  const StateLease state = unit.lease(Access::kRead);
  if (computes_with_master(unit))
    swap_contents(state.master, state.emas.front());
  else
    unit.lease_weights(Access::kOverwrite).shard.copy_(state.emas.front());
}

void use_master(FlatUnit& unit) {
  if (computes_with_master(unit))
    use_ema(unit);  // back
  else
    unit.refresh_weight_shard();
}

void for_each_unit(TrainingState& state, void (*change)(FlatUnit&)) {
  at::NoGradGuard no_grad;
  state.zero->finish_gathers();
  for (size_t s = 0; s < state.segments.size(); ++s) {
    FlatUnit& unit = state.segments[s].unit;
    if (unit.layout().size == 0) continue;
    change(unit);
    state.zero->publish(s);
  }
}

}  // namespace

void with_first_ema(TrainingState& state, const std::function<void()>& work) {
  if (state.ema_decays.empty()) return work();
  for_each_unit(state, use_ema);
  work();
  for_each_unit(state, use_master);
}

}  // namespace kiln
