#include "plan/search/search_traces.h"

#include "run/option_values.h"

namespace kiln {

namespace {

constexpr size_t kMostSteps = 32;  // some megabytes each
constexpr size_t kMostOfRanks = 24;

}  // namespace

TraceFamily& SearchTraces::family(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                  int64_t most_images) {
  auto& family = families_[{to_json(options).dump(), device, most_images}];
  if (!family) family = std::make_unique<TraceFamily>(options, data, device, most_images);
  return *family;
}

// Returns what tells the steps of ranks apart. From stage 2 on gradients of several passes are another
// program.
SearchTraces::RankKey SearchTraces::key_of(const StepTrace& like, const Sharding& sharding) {
  return {like.device,         like.options.compute.dtype, num_micro_steps(like) > 1, sharding.gpus,
          sharding.zero_stage, sharding.offload,           sharding.ranks_per_node};
}

RankStep& SearchTraces::rank(const StepTrace& like, const Sharding& sharding) {
  auto& rank = ranks_[key_of(like, sharding)];
  if (!rank) rank = std::make_unique<RankStep>(like, sharding);
  return *rank;
}

std::shared_ptr<const StepTrace> SearchTraces::of_rank(const StepTrace& source, const Sharding& sharding) {
  if (is_of(source, sharding)) return {std::shared_ptr<void>(), &source};
  const std::pair key{&source, key_of(source, sharding)};
  if (const auto known = of_ranks_.find(key); known != of_ranks_.end()) return known->second;
  if (of_ranks_.size() >= kMostOfRanks) of_ranks_.clear();
  auto trace = std::make_shared<StepTrace>(rank(source, sharding).trace(source));
  for (Span& span : trace->spans) {  // their bytes have been found
    span.events = {};
    span.calls = {};
  }
  return of_ranks_.emplace(key, std::move(trace)).first->second;
}

const StepTrace& SearchTraces::step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                    int64_t world_size, int64_t ranks_per_node) {
  const std::tuple key{to_json(options).dump(), device, world_size, ranks_per_node};
  if (const auto known = steps_.find(key); known != steps_.end()) return known->second;
  if (steps_.size() >= kMostSteps) steps_.clear();
  return steps_.emplace(key, trace_step(options, data, device, world_size, ranks_per_node)).first->second;
}

}  // namespace kiln
