// What `kiln plan --search` searches: which values of each searched option it tries (the given one, or all
// that the machine has a use for), and every configuration of a run that it chooses from, with figures that
// rank them.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "plan/run/plan.h"
#include "plan/search/search_traces.h"

namespace kiln {

// Shares of a GPU's memory: what leaves room for fragmentation and other programs, and all that can be had of
// a GPU that serves nothing else.
inline constexpr double kRoomyShare = 0.85, kFullShare = 0.97;

struct SearchOptions {
  PlanOptions plan;
  bool any_gpus = false;                   // 1, 2, 4, ... of them, instead of plan.gpus
  std::set<std::string> fixed{};           // those of kSearchedOptions that stay as plan.train says
  double deadline_days = 0, max_cost = 0;  // 0: none
  // Winners use no more than this share of a GPU's memory, unless nothing else fits.
  double memory_share = kRoomyShare;
};

inline constexpr const char* kSearchedOptions[] = {
    "micro-batch",       "compute-dtype",  "recompute",          "zero-stage",
    "offload-optimizer", "offload-params", "offload-activations"};

class SearchAxes {
 public:
  // REQUIRES: both outlive this.
  SearchAxes(const SearchOptions& search, const MachineProfile& machine)
      : search_(search), machine_(machine) {}

  bool is_fixed(const char* option) const { return search_.fixed.contains(option); }

  std::vector<at::ScalarType> dtypes() const;
  std::vector<int64_t> gpu_counts() const;                 // ascending
  std::vector<int64_t> micro_batches(int64_t gpus) const;  // a GPU's whole batch first
  std::vector<int64_t> stages(int64_t gpus) const;
  // Places where the optimizer may be, and at stage 3 the weights. Stage 3 with weights off the device needs
  // only one GPU.
  std::vector<Placement> optimizer_places() const;
  std::vector<Placement> weight_places(int64_t gpus, int64_t zero_stage) const;
  // True if it is given which activations are recomputed or offloaded.
  bool is_one_set() const;
  bool may_offload_activations() const;
  // Whether keep-gelu is left out of --untried-gpu, which keeps GELU's results where memory is free.
  std::vector<bool> gelu_choices() const;

 private:
  bool on_cuda() const { return machine_.device == DryRunDevice::kCuda; }

  const SearchOptions& search_;
  const MachineProfile& machine_;
};

struct Configuration {
  int64_t gpus = 1, micro_batch = 0, zero_stage = 0;
  at::ScalarType compute_dtype = at::kFloat;
  SegmentSet recompute{}, offload_activations{};
  StatePlacement offload{};
  bool leaves_gelu = false;  // out of --untried-gpu
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
