// What `kiln plan --search` chooses from: every configuration of a run, with figures that rank them.
#pragma once
#include <string>
#include <vector>

#include "plan/search/search_axes.h"
#include "plan/search/search_traces.h"

namespace kiln {

struct Configuration {
  int64_t gpus = 1, micro_batch = 0, zero_stage = 0;
  at::ScalarType compute_dtype = at::kFloat;
  SegmentSet recompute{}, offload_activations{};
  Placement offload_optimizer = Placement::kDevice, offload_params = Placement::kDevice;
  // Composed of few traces (plan/trace/trace_family.h), to rank by. Its plan takes as long, and needs no
  // fewer bytes: live bytes, context and communication are the same, the allocator's rounding and
  // fragmentation come on top.
  int64_t least_bytes = 0;
  double step_s = 0;  // 0 where it is too large
};
PlanOptions options_of(const SearchOptions& search, const Configuration& configuration);

// Micro-batches are halves, quarters, ... of a GPU's batch. Recomputation is of nothing, of everything and,
// where that lies between too much memory and much to spare, the fewest FLOPs that fit
// (plan/memory/segment_costs.h). bf16 stands for both halves where the machine has it. Activations, and at
// stage 3 weights, are offloaded only where everything else leaves too little.
std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                          const DataShape& data, SearchTraces& traces);
inline std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                                 const DataShape& data) {
  SearchTraces traces;
  return configurations(search, machine, data, traces);
}

}  // namespace kiln
