#include "step/forward_pass.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/aten.h"

namespace kiln {

at::Tensor forward_pass(const Denoiser& denoiser, Zero& zero, const ModelInput& input) {
  const at::NoGradGuard no_grad;
  const auto& segments = denoiser.segments();
  State state;
  SkipStack skips;
  for (size_t i = 0; i < segments.size(); ++i) {
    zero.gather(i, 1);
    skips.enter(state, segments[i]->skips());
    state = segments[i]->forward(state, input);
    skips.leave(state, segments[i]->skips());
    zero.release(i);
  }
  return state.hidden;
}

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

// True if the master weights are themselves the weights that compute.
bool computes_with_master(const FlatUnit& unit) {
  return unit.master.defined() && unit.master.is_same(unit.weight_shard);
}

// Puts the first EMA in the place of the weights. Returns a copy of the master, which use_master() needs,
// where the EMA has another dtype and cannot hold the master meanwhile; otherwise nothing.
at::Tensor use_ema(FlatUnit& unit) {
  const StateLease state = unit.lease(Access::kRead);
  const at::Tensor& ema = state.emas.front();
  if (!computes_with_master(unit)) {
    unit.lease_weights(Access::kOverwrite).shard.copy_(ema);
    return {};
  }
  if (state.master.scalar_type() == ema.scalar_type()) {
    swap_contents(state.master, ema);
    return {};
  }
  at::Tensor kept = state.master.clone();
  state.master.copy_(ema);
  return kept;
}

void use_master(FlatUnit& unit, const at::Tensor& kept) {
  if (kept.defined())
    unit.master.copy_(kept);
  else if (computes_with_master(unit))
    use_ema(unit);  // swaps them back
  else
    unit.refresh_weight_shard();
}

void for_each_unit(TrainingState& state, const std::function<void(FlatUnit&, size_t)>& change) {
  at::NoGradGuard no_grad;
  state.zero->finish_gathers();
  for (size_t s = 0; s < state.segments.size(); ++s) {
    FlatUnit& unit = state.segments[s].unit;
    if (unit.layout().size == 0 || state.segments[s].is_head) continue;
    change(unit, s);
    state.zero->publish(s);
  }
}

}  // namespace

void with_first_ema(TrainingState& state, const std::function<void()>& work) {
  if (state.ema_decays.empty()) return work();
  std::vector<at::Tensor> kept(state.segments.size());
  for_each_unit(state, [&](FlatUnit& unit, size_t s) { kept[s] = use_ema(unit); });
  work();
  for_each_unit(state, [&](FlatUnit& unit, size_t s) { use_master(unit, std::exchange(kept[s], {})); });
}

}  // namespace kiln
