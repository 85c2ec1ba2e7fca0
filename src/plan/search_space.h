// What `kiln plan --search` chooses from: every configuration of a run, with figures that rank them.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace kiln {

struct SearchOptions {
  PlanOptions plan;
  bool any_gpus = false;                   // 1, 2, 4, ... of them, instead of plan.gpus
  std::set<std::string> fixed{};           // of kSearchedOptions: what plan.train says stays
  double deadline_days = 0, max_cost = 0;  // 0: none
};

inline constexpr const char* kSearchedOptions[] = {
    "micro-batch",       "compute-dtype",  "recompute",          "zero-stage",
    "offload-optimizer", "offload-params", "offload-activations"};

struct Configuration {
  int64_t gpus = 1, micro_batch = 0, zero_stage = 0;
  std::string compute_dtype{}, recompute{}, offload_optimizer{}, offload_params = "none",
                                                                 offload_activations = "none";
  // Composed of few traces (plan/trace_family.h), to rank by. Its plan takes as long, and needs no fewer
  // bytes: live bytes, context and communication are the same, the allocator's rounding and fragmentation
  // come on top.
  int64_t least_bytes = 0;
  double step_s = 0;  // 0 where it is too large
};
PlanOptions options_of(const SearchOptions& search, const Configuration& configuration);

// Micro-batches are halves, quarters, ... of a GPU's batch. Recomputation is of nothing, of everything and,
// where that lies between too much memory and much to spare, the fewest FLOPs that fit
// (plan/segment_costs.h). bf16 stands for both halves where the machine has it. Activations, and at stage 3
// weights, are offloaded only where everything else leaves too little.
std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                          const DataShape& data);

}  // namespace kiln
