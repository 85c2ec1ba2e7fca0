// The configurations of a search. Finds the one that is best for a goal: the same that planning all of them
// would find.
#pragma once
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "plan/run/make_plan.h"
#include "plan/search/search_space.h"

namespace kiln {

struct Limits {
  double days = 0, cost = 0;  // 0: none

  bool met_by(double planned_days, double planned_cost) const {
    return (days == 0 || planned_days <= days) && (cost == 0 || planned_cost <= cost);
  }
};

// What a goal minimises, and what decides if that is equal.
using Figures = std::pair<double, double>;
struct Goal {
  const char* name;
  Figures (*screened)(const Configuration&);
  Figures (*planned)(const Plan&);
};
extern const Goal kFastest, kCheapest, kLeastMemory;

class Candidates {
 public:
  // REQUIRES: all but `data` outlive this.
  Candidates(const SearchOptions& options, const MachineProfile& machine, const DataOutlook& data,
             SearchTraces& traces);

  const std::vector<Configuration>& all() const { return configurations_; }
  const DataOutlook& data() const { return data_; }

  // Returns the plan with the lowest figure of all that fit, with memory to spare, and meet `limits`; null if
  // there is none. `gpus`: considers this number of GPUs only.
  const Plan* best(const Goal& goal, const Limits& limits, std::optional<int64_t> gpus = {});

  // Returns the plan of what needs least, whether it fits or not.
  const Plan& smallest();

 private:
  bool fits(const Plan& plan) const;
  std::vector<size_t> ranked(const Goal& goal) const;
  bool may_meet(const Limits& limits, const Configuration& configuration) const;
  const Plan& planned(size_t index);

  const SearchOptions& options_;
  const MachineProfile& machine_;
  const DataOutlook data_;
  SearchTraces& traces_;
  const std::vector<Configuration> configurations_;
  std::vector<size_t> possible_;  // within the memory, as far as screening tells
  std::map<size_t, Plan> plans_;
  double most_share_;
};

}  // namespace kiln
