// Traces that the searches of a run on several machines share, because a step is the same on every GPU.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "plan/ranks/rank_step.h"
#include "plan/trace/trace_family.h"

namespace kiln {

class SearchTraces {
 public:
  // Returns the family of these options, whatever their batches. The reference stays valid.
  TraceFamily& family(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                      int64_t most_images);

  // Returns the rank of `sharding` that takes steps like `like`, a trace of a family. The reference stays
  // valid.
  RankStep& rank(const StepTrace& like, const Sharding& sharding);
  // Returns `source`, a trace of a family, as that rank takes it: its operations and the bytes of its spans,
  // without the events that the bytes were found from.
  std::shared_ptr<const StepTrace> of_rank(const StepTrace& source, const Sharding& sharding);

  // Returns what trace_step() returns. The reference stays valid until the next call.
  const StepTrace& step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        int64_t world_size, int64_t ranks_per_node);

 private:
  using RankKey = std::tuple<DryRunDevice, at::ScalarType, bool, int64_t, int64_t, StatePlacement, int64_t>;
  static RankKey key_of(const StepTrace& like, const Sharding& sharding);

  std::map<std::tuple<std::string, DryRunDevice, int64_t>, std::unique_ptr<TraceFamily>> families_;
  std::map<std::tuple<std::string, DryRunDevice, int64_t, int64_t>, StepTrace> steps_;
  std::map<RankKey, std::unique_ptr<RankStep>> ranks_;
  std::map<std::pair<const StepTrace*, RankKey>, std::shared_ptr<const StepTrace>> of_ranks_;
};

}  // namespace kiln
