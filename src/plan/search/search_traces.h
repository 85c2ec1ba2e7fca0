// Traces that the searches of a run on several machines share: a step is the same on every GPU.
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
  // The family of these options, whatever their batches; it stays where it is.
  TraceFamily& family(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                      int64_t most_images);

  // The rank of `sharding` that takes steps like `like`'s, a trace of a family; it stays where it is.
  RankStep& rank(const StepTrace& like, const Sharding& sharding);
  // `source`, a trace of a family, as that rank takes it: its operations and the bytes of its spans, without
  // the events that these were found from.
  std::shared_ptr<const StepTrace> of_rank(const StepTrace& source, const Sharding& sharding);

  // As trace_step(). Stays until the next call.
  const StepTrace& step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        int64_t world_size, int64_t ranks_per_node);

 private:
  using RankKey =
      std::tuple<DryRunDevice, at::ScalarType, bool, int64_t, int64_t, Placement, Placement, int64_t>;
  static RankKey key_of(const StepTrace& like, const Sharding& sharding);

  std::map<std::tuple<std::string, DryRunDevice, int64_t>, std::unique_ptr<TraceFamily>> families_;
  std::map<std::tuple<std::string, DryRunDevice, int64_t, int64_t>, StepTrace> steps_;
  std::map<RankKey, std::unique_ptr<RankStep>> ranks_;
  std::map<std::pair<const StepTrace*, RankKey>, std::shared_ptr<const StepTrace>> of_ranks_;
};

}  // namespace kiln
