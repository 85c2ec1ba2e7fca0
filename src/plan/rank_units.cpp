#include "plan/rank_units.h"

#include <algorithm>
#include <map>

#include "core/aten.h"
#include "parallel/host_exchange.h"
#include "parallel/nvme_state.h"

namespace kiln {

RankUnits::RankUnits(const StepTrace& trace, const Sharding& sharding, const Zero& zero)
    : options_(trace.unit) {
  const bool has_host = trace.device == DryRunDevice::kCuda;
  options_.placement = placement_of(sharding.offload_optimizer, has_host);
  options_.weight_placement = placement_of(sharding.offload_params, has_host);
  if (options_.placement == Placement::kNvme || options_.weight_placement == Placement::kNvme)
    options_.nvme = make_nvme_state(zero, trace.segment_weights, options_, /*disk=*/{});
  units_.reserve(trace.segment_weights.size());
  for (const int64_t weights : trace.segment_weights) {
    FlatLayout layout;
    if (weights > 0) layout.add("weights", {weights});
    options_.sharding = zero.sharding_of(weights);
    options_.nvme_unit = units_.size();
    units_.emplace_back("unit", std::move(layout), options_);
  }
}

void RankUnits::describe(StepTrace& trace) const {
  MemoryRecorder memory;
  const bool has_host = trace.device == DryRunDevice::kCuda;
  trace.offloaded = {};
  for (const FlatUnit& unit : units_) {
    memory.register_unit(unit);
    if (has_host) trace.offloaded.host += unit.host_bytes();
  }
  if (options_.nvme) {
    trace.offloaded.disk = options_.nvme->disk_bytes();
    for (const at::Tensor& buffer : options_.nvme->buffers()) {
      if (has_host) trace.offloaded.host += static_cast<int64_t>(buffer.nbytes());
      memory.register_tensor(buffer, MemoryKind::kStaging);
    }
  }
  if (options_.placement != Placement::kDevice && has_host) trace.offloaded.host += exchange_bytes();
  trace.unit.placement = options_.placement;
  trace.unit.weight_placement = options_.weight_placement;
  std::map<MemoryKind, int64_t> persistent = memory.finish().persistent;
  if (const auto constants = trace.memory.persistent.find(MemoryKind::kConstants);
      constants != trace.memory.persistent.end())
    persistent.insert(*constants);
  trace.memory.persistent = std::move(persistent);
  trace.memory.persistent_bytes = 0;
  for (const auto& [kind, bytes] : trace.memory.persistent) trace.memory.persistent_bytes += bytes;
}

int64_t RankUnits::exchange_bytes() const {
  int64_t largest = 0;
  for (const FlatUnit& unit : units_) largest = std::max(largest, unit.shard_size());
  return HostExchange(at::kMeta, largest, options_.grad_dtype, options_.compute_dtype).host_bytes();
}

}  // namespace kiln
