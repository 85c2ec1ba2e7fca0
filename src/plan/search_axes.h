// The values of each searched option that are tried: the given one, or all that the machine has a use for.
#pragma once
#include <string>
#include <vector>

#include "plan/search_space.h"

namespace kiln {

class SearchAxes {
 public:
  // REQUIRES: both outlive this.
  SearchAxes(const SearchOptions& search, const MachineProfile& machine)
      : search_(search), machine_(machine) {}

  bool is_fixed(const char* option) const { return search_.fixed.contains(option); }

  std::vector<std::string> dtypes() const;
  std::vector<int64_t> gpu_counts() const;                 // ascending
  std::vector<int64_t> micro_batches(int64_t gpus) const;  // a GPU's whole batch first
  std::vector<int64_t> stages(int64_t gpus) const;
  // Of the optimizer; and of the weights, at stage 3, for which a single GPU is enough then.
  std::vector<std::string> optimizer_places() const;
  std::vector<std::string> weight_places(int64_t gpus, int64_t zero_stage) const;
  // Which activations are recomputed or offloaded is given.
  bool is_one_set() const;
  bool may_offload_activations() const;

 private:
  bool on_cuda() const { return machine_.device == DryRunDevice::kCuda; }

  const SearchOptions& search_;
  const MachineProfile& machine_;
};

}  // namespace kiln
