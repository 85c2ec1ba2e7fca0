// Traces that the searches of a run on several machines share: a step is the same on every GPU.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "plan/trace/trace_family.h"

namespace kiln {

class SearchTraces {
 public:
  // The family of these options, whatever their batches; it stays where it is.
  TraceFamily& family(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                      int64_t most_images);

  // As trace_step(). Stays until the next call.
  const StepTrace& step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        int64_t world_size, int64_t ranks_per_node);

 private:
  std::map<std::tuple<std::string, DryRunDevice, int64_t>, std::unique_ptr<TraceFamily>> families_;
  std::map<std::tuple<std::string, DryRunDevice, int64_t, int64_t>, StepTrace> steps_;
};

}  // namespace kiln
