// The flat units of one rank at a dry run, made for a trace as TrainingState makes them.
#pragma once
#include <vector>

#include "plan/sharding.h"

namespace kiln {

class RankUnits {
 public:
  // Of a rank that offloads as `sharding` says. `trace`: of the same segments.
  RankUnits(const StepTrace& trace, const Sharding& sharding, const Zero& zero);

  std::vector<FlatUnit>& units() { return units_; }

  // Fills in what of the training state is where. What is beside the units stays as it is.
  void describe(StepTrace& trace) const;

 private:
  int64_t exchange_bytes() const;

  FlatUnitOptions options_;
  std::vector<FlatUnit> units_;
};

}  // namespace kiln
