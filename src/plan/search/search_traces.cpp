#include "plan/search/search_traces.h"

#include "run/option_values.h"

namespace kiln {

namespace {

constexpr size_t kMostSteps = 32;  // some megabytes each

}  // namespace

TraceFamily& SearchTraces::family(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                  int64_t most_images) {
  auto& family = families_[{to_json(options).dump(), device, most_images}];
  if (!family) family = std::make_unique<TraceFamily>(options, data, device, most_images);
  return *family;
}

const StepTrace& SearchTraces::step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                    int64_t world_size, int64_t ranks_per_node) {
  const std::tuple key{to_json(options).dump(), device, world_size, ranks_per_node};
  if (const auto known = steps_.find(key); known != steps_.end()) return known->second;
  if (steps_.size() >= kMostSteps) steps_.clear();
  return steps_.emplace(key, trace_step(options, data, device, world_size, ranks_per_node)).first->second;
}

}  // namespace kiln
