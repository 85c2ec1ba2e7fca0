// Every configuration of a run that `kiln plan --search` chooses from, with figures that rank them.
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
  StatePlacement offload{};
  // Figures to rank by, composed from few traces (plan/trace/trace_family.h). Its plan takes as long and
  // needs no fewer bytes: live bytes, context and communication are the same, and the allocator's rounding
  // and fragmentation come on top.
  int64_t least_bytes = 0;
  double step_s = 0;  // 0 if it is too large
};
PlanOptions options_of(const SearchOptions& search, const Configuration& configuration);

// Returns every configuration of a search. Micro-batches are a GPU's batch, its half, its quarter, ...
// Nothing is recomputed, or everything. If the first needs too much memory and the second fits, the fewest
// FLOPs that fit are recomputed too (plan/memory/segment_costs.h). bf16 stands for both half-precision dtypes
// if the machine has it. Activations, and at stage 3 weights, are offloaded only if everything else leaves
// too little room.
std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                          const DataDescription& data, SearchTraces& traces);
inline std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                                 const DataDescription& data) {
  SearchTraces traces;
  return configurations(search, machine, data, traces);
}

}  // namespace kiln
