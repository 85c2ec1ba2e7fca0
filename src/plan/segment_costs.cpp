#include "plan/segment_costs.h"

#include <algorithm>

#include "plan/trace_parts.h"

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
  int64_t live = trace.memory.persistent_bytes, gathering_peak = 0;
  bool in_forward = true;
  for (const MemoryMark& mark : trace.memory.marks) {
    const auto segment = static_cast<size_t>(std::max(mark.segment, 0));
    if (mark.phase == StepPhase::kForward && segment == 0) {
      const std::vector<int64_t> none(num_segments);
      walks.push_back({live, none, none, none, none});
    }
    const auto raise = [&](std::vector<int64_t>& peaks, int64_t peak) {
      peaks[segment] = std::max(peaks[segment], peak);
    };
    if (mark.phase == StepPhase::kForward) {
      in_forward = true;
      walks.back().live_after[segment] = mark.live_bytes;
      raise(walks.back().forward_peak, std::max(mark.peak_bytes, gathering_peak));
      gathering_peak = 0;
    } else if (mark.phase == StepPhase::kCommunication && mark.segment >= 0) {
      // Before a forward: its weights arrive. Around a backward: they do, and gradients leave.
      const bool before_forward = in_forward || walks.empty() || segment == 0;
      if (before_forward) gathering_peak = mark.peak_bytes;
      if (!in_forward && !walks.empty()) raise(walks.back().backward_peak, mark.peak_bytes);
    } else if (mark.phase == StepPhase::kLoss) {
      in_forward = false;
      walks.back().loss_peak = mark.peak_bytes;
    } else if (mark.phase == StepPhase::kRecompute) {
      walks.back().recompute_peak[segment] = mark.peak_bytes;
    } else if (mark.phase == StepPhase::kBackward) {
      raise(walks.back().backward_peak, mark.peak_bytes);
    }
    live = mark.live_bytes;
  }
  return walks;
}

bool in_walk(const MemoryMark& mark) {
  return mark.phase == StepPhase::kForward || mark.phase == StepPhase::kLoss ||
         mark.phase == StepPhase::kRecompute || mark.phase == StepPhase::kBackward ||
         (mark.phase == StepPhase::kCommunication && mark.segment >= 0);
}

int64_t other_peak_of(const StepTrace& trace) {
  int64_t peak = trace.memory.persistent_bytes;
  for (const MemoryMark& mark : trace.memory.marks)
    if (!in_walk(mark)) peak = std::max(peak, mark.peak_bytes);
  return peak;
}

using Traces = std::vector<const StepTrace*>;
using Walks = std::vector<std::vector<TracedWalk>>;  // [trace][walk]

StepTrace trace_uniform(TrainOptions options, Activations activations, const DataShape& data,
                        DryRunDevice device, int64_t world_size) {
  options.recompute = activations == Activations::kRecompute ? "all" : "none";
  options.offload_activations = activations == Activations::kOffload ? "all" : "none";
  return trace_step(options, data, device, world_size);
}

Walks walks_of(const Traces& uniform) {
  Walks walks;
  for (const StepTrace* trace : uniform) walks.push_back(walks_of(*trace));
  return walks;
}

SegmentCosts::Choice choice_of(const TracedWalk& walk, size_t segment) {
  const int64_t before = walk.live_before(segment);
  return {.held_bytes = walk.live_after[segment] - before,
          .forward_peak_bytes = walk.forward_peak[segment] - before,
          .recompute_peak_bytes = std::max<int64_t>(0, walk.recompute_peak[segment] - before),
          .backward_peak_bytes = walk.backward_peak[segment] - before};
}

WalkCosts walk_costs(const Walks& walks, size_t index) {
  const TracedWalk &keep = walks[0][index], &recompute = walks[1][index];
  const bool offloads = walks.size() > 2;
  const size_t num_segments = keep.live_after.size();
  WalkCosts costs{.live_bytes = keep.live_bytes,
                  .segments = std::vector<SegmentCosts>(num_segments),
                  .loss_peak_bytes = keep.loss_peak - keep.live_after.back()};
  for (size_t i = 0; i < num_segments; ++i) {
    SegmentCosts& segment = costs.segments[i];
    segment.choices[0] = choice_of(keep, i);
    segment.choices[1] = segment.choices[2] = choice_of(recompute, i);
    if (!offloads) continue;
    const TracedWalk& offload = walks[2][index];
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

void drop_dominated(std::vector<WalkCosts>& walks) {
  std::vector<WalkCosts> kept;
  for (size_t i = 0; i < walks.size(); ++i) {
    const bool covered = std::any_of(walks.begin() + static_cast<int64_t>(i) + 1, walks.end(),
                                     [&](const WalkCosts& later) { return dominated(walks[i], later); });
    if (!covered) kept.push_back(walks[i]);
  }
  walks = std::move(kept);
}

StepCosts compose(const Traces& uniform, const Walks& walks) {
  const StepTrace &keep = *uniform[0], &recompute = *uniform[1];
  const size_t num_segments = keep.segments.size();
  StepCosts costs{.walks = {},
                  .recompute_flops = std::vector<double>(num_segments),
                  .host_bytes = std::vector<int64_t>(num_segments),
                  .persistent_bytes = keep.memory.persistent_bytes,
                  .other_peak_bytes = other_peak_of(keep),
                  .can_offload = uniform.size() > 2};
  for (size_t i = 0; i < walks[0].size(); ++i) costs.walks.push_back(walk_costs(walks, i));
  for (const OpRecord& op : recompute.ops)
    if (op.phase == StepPhase::kRecompute && op.segment >= 0)
      costs.recompute_flops[static_cast<size_t>(op.segment)] += op.flops * static_cast<double>(op.times);
  for (const WalkCosts& walk : costs.walks)
    for (size_t i = 0; i < num_segments; ++i)
      costs.host_bytes[i] = std::max(costs.host_bytes[i], walk.segments[i].fetched_bytes);
  return costs;
}

}  // namespace

StepCosts step_costs(const std::vector<const StepTrace*>& uniform) {
  StepCosts costs = compose(uniform, walks_of(uniform));
  drop_dominated(costs.walks);
  return costs;
}

StepCosts step_costs(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size) {
  std::vector<StepTrace> traces;
  for (Activations activations : kChoices)
    if (activations != Activations::kOffload || device == DryRunDevice::kCuda)
      traces.push_back(trace_uniform(options, activations, data, device, world_size));
  Traces uniform;
  for (const StepTrace& trace : traces) uniform.push_back(&trace);
  return step_costs(uniform);
}

StepTrace mixed_ops(const StepTrace& keep, const StepTrace& recompute,
                    const std::vector<MemoryChoice>& choices) {
  const std::vector<TracePart> keep_parts = parts_of(keep), recompute_parts = parts_of(recompute);
  StepTrace mixed = recompute;
  mixed.ops.clear();
  mixed.memory.marks.clear();
  mixed.memory.events.clear();
  size_t kept = 0;  // mark of `keep`, which has all but those that recompute
  for (size_t i = 0; i < recompute_parts.size(); ++i) {
    const MemoryMark& mark = recompute.memory.marks[i];
    const bool keeps =
        mark.segment >= 0 && choices[static_cast<size_t>(mark.segment)].activations == Activations::kKeep;
    const bool recomputes = mark.phase == StepPhase::kRecompute;
    const TracePart& part = keeps && !recomputes ? keep_parts.at(kept) : recompute_parts[i];
    const std::vector<OpRecord>& ops = keeps ? keep.ops : recompute.ops;
    if (!recomputes) ++kept;
    if (keeps && recomputes) continue;
    mixed.memory.marks.push_back(mark);
    mixed.ops.insert(mixed.ops.end(), ops.begin() + static_cast<int64_t>(part.ops_begin),
                     ops.begin() + static_cast<int64_t>(part.ops_end));
  }
  return mixed;
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
