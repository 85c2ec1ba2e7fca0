#include "plan/segment_costs.h"

#include <algorithm>

namespace kiln {

namespace {

constexpr Activations kChoices[] = {Activations::kKeep, Activations::kRecompute, Activations::kOffload};

// Live and peak bytes of one walk of a trace, as they are.
struct TracedWalk {
  int64_t live_bytes = 0;  // before the first forward
  std::vector<int64_t> live_after, forward_peak, recompute_peak, backward_peak;
  int64_t loss_peak = 0;

  int64_t live_before(size_t segment) const { return segment == 0 ? live_bytes : live_after[segment - 1]; }
};

std::vector<TracedWalk> walks_of(const StepTrace& trace) {
  const size_t num_segments = trace.segments.size();
  std::vector<TracedWalk> walks;
  int64_t live = trace.memory.persistent_bytes;
  for (const MemoryMark& mark : trace.memory.marks) {
    const auto segment = static_cast<size_t>(std::max(mark.segment, 0));
    if (mark.phase == StepPhase::kForward && segment == 0) {
      const std::vector<int64_t> none(num_segments);
      walks.push_back({live, none, none, none, none});
    }
    if (mark.phase == StepPhase::kForward) {
      walks.back().live_after[segment] = mark.live_bytes;
      walks.back().forward_peak[segment] = mark.peak_bytes;
    } else if (mark.phase == StepPhase::kLoss) {
      walks.back().loss_peak = mark.peak_bytes;
    } else if (mark.phase == StepPhase::kRecompute) {
      walks.back().recompute_peak[segment] = mark.peak_bytes;
    } else if (mark.phase == StepPhase::kBackward) {
      walks.back().backward_peak[segment] = mark.peak_bytes;
    }
    live = mark.live_bytes;
  }
  return walks;
}

bool in_walk(StepPhase phase) {
  return phase == StepPhase::kForward || phase == StepPhase::kLoss || phase == StepPhase::kRecompute ||
         phase == StepPhase::kBackward;
}

int64_t other_peak_of(const StepTrace& trace) {
  int64_t peak = trace.memory.persistent_bytes;
  for (const MemoryMark& mark : trace.memory.marks)
    if (!in_walk(mark.phase)) peak = std::max(peak, mark.peak_bytes);
  return peak;
}

// The traces of one step under keep, recompute and offload; without the last where there is no host.
struct UniformTraces {
  std::vector<StepTrace> traces;
  std::vector<std::vector<TracedWalk>> walks;  // [trace][walk]
};

StepTrace trace_uniform(TrainOptions options, Activations activations, const DataShape& data,
                        DryRunDevice device) {
  options.recompute = activations == Activations::kRecompute ? "all" : "none";
  options.offload_activations = activations == Activations::kOffload ? "all" : "none";
  return trace_step(options, data, device);
}

UniformTraces uniform_traces(const TrainOptions& options, const DataShape& data, DryRunDevice device) {
  UniformTraces uniform;
  for (Activations activations : kChoices) {
    if (activations == Activations::kOffload && device != DryRunDevice::kCuda) continue;
    uniform.traces.push_back(trace_uniform(options, activations, data, device));
    uniform.walks.push_back(walks_of(uniform.traces.back()));
  }
  return uniform;
}

SegmentCosts::Choice choice_of(const TracedWalk& walk, size_t segment) {
  const int64_t before = walk.live_before(segment);
  return {.held_bytes = walk.live_after[segment] - before,
          .forward_peak_bytes = walk.forward_peak[segment] - before,
          .recompute_peak_bytes = std::max<int64_t>(0, walk.recompute_peak[segment] - before),
          .backward_peak_bytes = walk.backward_peak[segment] - before};
}

WalkCosts walk_costs(const UniformTraces& uniform, size_t index) {
  const TracedWalk &keep = uniform.walks[0][index], &recompute = uniform.walks[1][index];
  const bool offloads = uniform.walks.size() > 2;
  const size_t num_segments = keep.live_after.size();
  WalkCosts costs{.live_bytes = keep.live_bytes,
                  .segments = std::vector<SegmentCosts>(num_segments),
                  .loss_peak_bytes = keep.loss_peak - keep.live_after.back()};
  for (size_t i = 0; i < num_segments; ++i) {
    SegmentCosts& segment = costs.segments[i];
    segment.choices[0] = choice_of(keep, i);
    segment.choices[1] = segment.choices[2] = choice_of(recompute, i);
    if (!offloads) continue;
    const TracedWalk& offload = uniform.walks[2][index];
    segment.choices[2] = choice_of(offload, i);
    segment.fetched_bytes = segment.choices[1].held_bytes - segment.choices[2].held_bytes;
    if (i > 0) segment.choices[2].backward_peak_bytes -= costs.segments[i - 1].fetched_bytes;
  }
  return costs;
}

// A walk between two others of the same size starts with what the losses so far add, no more.
bool dominated(const WalkCosts& walk, const WalkCosts& later) {
  WalkCosts same = walk;
  same.live_bytes = later.live_bytes;
  return walk.live_bytes <= later.live_bytes && same == later;
}

// Micro-batches of a step: so many whole ones, and the rest.
struct MicroBatches {
  int64_t size = 0, num_whole = 0, rest = 0;
};

MicroBatches micro_batches_of(const TrainOptions& options) {
  const int64_t size =
      options.micro_batch > 0 ? std::min(options.micro_batch, options.global_batch) : options.global_batch;
  return {.size = size, .num_whole = options.global_batch / size, .rest = options.global_batch % size};
}

// With fewer whole micro-batches; the first differs from those after it, and what all of them add shows
// between the second and the third.
constexpr int64_t kTracedMicroBatches = 2;

TrainOptions shortened(const TrainOptions& options, const MicroBatches& micro, int64_t num_whole) {
  TrainOptions shorter = options;
  shorter.global_batch = micro.size * num_whole + micro.rest;
  return shorter;
}

}  // namespace

StepCosts step_costs(const TrainOptions& options, const DataShape& data, DryRunDevice device) {
  const MicroBatches micro = micro_batches_of(options);
  const int64_t left_out = std::max<int64_t>(0, micro.num_whole - kTracedMicroBatches);
  const TrainOptions traced = left_out > 0 ? shortened(options, micro, kTracedMicroBatches) : options;
  const UniformTraces uniform = uniform_traces(traced, data, device);
  const StepTrace &keep = uniform.traces[0], &recompute = uniform.traces[1];

  StepCosts costs{.persistent_bytes = keep.memory.persistent_bytes,
                  .other_peak_bytes = other_peak_of(keep),
                  .can_offload = uniform.traces.size() > 2};
  std::vector<WalkCosts> walks;
  for (size_t i = 0; i < uniform.walks[0].size(); ++i) walks.push_back(walk_costs(uniform, i));
  if (left_out > 0) {
    const StepTrace longer = trace_uniform(shortened(options, micro, kTracedMicroBatches + 1),
                                           Activations::kRecompute, data, device);
    costs.other_peak_bytes += left_out * (other_peak_of(longer) - other_peak_of(recompute));
    const std::vector<TracedWalk> longer_walks = walks_of(longer);
    const size_t first_moved = kTracedMicroBatches - 1;
    for (size_t i = first_moved; i < walks.size(); ++i)
      walks[i].live_bytes += left_out * (longer_walks[i + 1].live_bytes - uniform.walks[1][i].live_bytes);
  }
  for (size_t i = 0; i < walks.size(); ++i) {
    const bool covered = std::any_of(walks.begin() + static_cast<int64_t>(i) + 1, walks.end(),
                                     [&](const WalkCosts& later) { return dominated(walks[i], later); });
    if (!covered) costs.walks.push_back(walks[i]);
  }

  costs.recompute_flops.resize(keep.segments.size());
  costs.host_bytes.resize(keep.segments.size());
  const double images = static_cast<double>(options.global_batch) / static_cast<double>(traced.global_batch);
  for (const OpRecord& op : recompute.ops)
    if (op.phase == StepPhase::kRecompute && op.segment >= 0)
      costs.recompute_flops[static_cast<size_t>(op.segment)] += op.flops * images;
  for (const WalkCosts& walk : walks)
    for (size_t i = 0; i < walk.segments.size(); ++i)
      costs.host_bytes[i] = std::max(costs.host_bytes[i], walk.segments[i].fetched_bytes);
  return costs;
}

int64_t peak_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices) {
  int64_t peak = costs.other_peak_bytes;
  for (const WalkCosts& walk : costs.walks) {
    int64_t live = walk.live_bytes, fetched = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      const SegmentCosts& segment = walk.segments[i];
      const SegmentCosts::Choice& choice = segment.of(choices[i].activations);
      peak = std::max({peak, live + choice.forward_peak_bytes, live + choice.recompute_peak_bytes,
                       live + choice.backward_peak_bytes + fetched});
      live += choice.held_bytes;
      fetched = choices[i].activations == Activations::kOffload ? segment.fetched_bytes : 0;
    }
    peak = std::max(peak, live + walk.loss_peak_bytes + fetched);
  }
  return peak;
}

double recompute_flops(const StepCosts& costs, const std::vector<MemoryChoice>& choices) {
  double flops = 0;
  for (size_t i = 0; i < choices.size(); ++i)
    if (choices[i].activations != Activations::kKeep) flops += costs.recompute_flops[i];
  return flops;
}

int64_t host_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices) {
  int64_t bytes = 0;
  for (size_t i = 0; i < choices.size(); ++i)
    if (choices[i].activations == Activations::kOffload) bytes += costs.host_bytes[i];
  return bytes;
}

}  // namespace kiln
