// The state and the collectives of one of several ranks, without tracing its step again: the real flat units
// and their ZeRO, called as the step calls them.
#pragma once
#include <vector>

#include "plan/sharding.h"

namespace kiln {

struct RankWalk {
  RankState state;
  std::vector<CollectiveEvent> collectives;  // at the positions of the trace's operations
};
// Of rank 0. `trace`: of a step of the same model on any number of ranks.
RankWalk walk_rank(const StepTrace& trace, const Sharding& sharding);

Placement placement_of(const Sharding& sharding, DryRunDevice device);

}  // namespace kiln
