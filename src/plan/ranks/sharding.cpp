#include "plan/ranks/sharding.h"

#include "core/error.h"

namespace kiln {

Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine) {
  const bool has_nodes = machine.node_bytes_per_s > 0 && gpus > machine.gpus_per_node;
  return {.gpus = gpus,
          .zero_stage = options.zero.stage,
          .offload_optimizer = options.offload.optimizer,
          .offload_params = options.offload.params,
          .ranks_per_node = options.zero.shard_within_node && has_nodes ? machine.gpus_per_node : 0};
}

void validate(const Sharding& sharding) {
  if (sharding.gpus < 1) fail("plan", "--gpus expects a positive number, got {}", sharding.gpus);
  if (sharding.zero_stage < 0 || sharding.zero_stage > 3)
    fail("plan", "--zero-stage expects 0, 1, 2 or 3, got {}", sharding.zero_stage);
}

bool is_of(const StepTrace& trace, const Sharding& sharding) {
  const bool has_host = trace.device == DryRunDevice::kCuda;
  return trace.world_size == sharding.gpus && trace.zero.stage == sharding.zero_stage &&
         trace.ranks_per_node == sharding.ranks_per_node &&
         trace.unit.placement == placement_of(sharding.offload_optimizer, has_host) &&
         trace.unit.weight_placement == placement_of(sharding.offload_params, has_host);
}

}  // namespace kiln
