#include "plan/memory/segment_costs.h"

#include <algorithm>

namespace kiln {

namespace {

constexpr Activations kChoices[] = {Activations::kKeep, Activations::kRecompute, Activations::kOffload};

// Live and peak bytes of one walk, as traced.
struct TracedWalk {
  int64_t live_bytes = 0;  // before the first forward
  std::vector<int64_t> live_after, forward_peak, recompute_peak, backward_peak;
  int64_t loss_peak = 0;

  int64_t live_before(size_t segment) const { return segment == 0 ? live_bytes : live_after[segment - 1]; }
};

void raise(int64_t& peak, int64_t bytes) { peak = std::max(peak, bytes); }

bool is_communication_of_walk(const Span& span) {
  return span.phase == StepPhase::kCommunication && span.in_micro_step();
}

std::vector<TracedWalk> walks_of(const StepTrace& trace) {
  const std::vector<int64_t> none(trace.segments.size());
  std::vector<TracedWalk> walks;
  int64_t live = trace.memory.persistent_bytes;
  bool has_loss = false;  // the walk has had its loss: communication then belongs to a backward
  for (const Span& span : trace.spans) {
    const auto segment = static_cast<size_t>(std::max(span.segment, 0));
    if (span.micro_step == static_cast<int64_t>(walks.size())) {
      walks.push_back({live, none, none, none, none});
      has_loss = false;
    }
    if (span.phase == StepPhase::kForward) {
      if (segment == 0) walks.back().live_bytes = live;
      walks.back().live_after[segment] = span.live_bytes;
      raise(walks.back().forward_peak[segment], span.peak_bytes);
    } else if (is_communication_of_walk(span) && span.segment >= 0) {
      raise((has_loss ? walks.back().backward_peak : walks.back().forward_peak)[segment], span.peak_bytes);
    } else if (is_communication_of_walk(span)) {  // of the weights of the loss's head
      raise(walks.back().loss_peak, span.peak_bytes);
    } else if (span.phase == StepPhase::kLoss) {
      has_loss = true;
      raise(walks.back().loss_peak, span.peak_bytes);
    } else if (span.phase == StepPhase::kRecompute) {
      walks.back().recompute_peak[segment] = span.peak_bytes;
    } else if (span.phase == StepPhase::kBackward) {
      raise(walks.back().backward_peak[segment], span.peak_bytes);
    }
    live = span.live_bytes;
  }
  return walks;
}

bool in_walk(const Span& span) {
  return span.phase == StepPhase::kForward || span.phase == StepPhase::kLoss ||
         span.phase == StepPhase::kRecompute || span.phase == StepPhase::kBackward ||
         is_communication_of_walk(span);
}

int64_t other_peak_of(const StepTrace& trace) {
  int64_t peak = trace.memory.persistent_bytes;
  for (const Span& span : trace.spans)
    if (!in_walk(span)) raise(peak, span.peak_bytes);
  return peak;
}

using Traces = std::vector<const StepTrace*>;
using Walks = std::vector<std::vector<TracedWalk>>;  // [trace][walk]

StepTrace trace_uniform(TrainOptions options, Activations activations, const DataShape& data,
                        DryRunDevice device, int64_t world_size) {
  options.memory.recompute = activations == Activations::kRecompute ? SegmentSet::all() : SegmentSet();
  options.memory.offload_activations =
      activations == Activations::kOffload ? SegmentSet::all() : SegmentSet();
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

// True if `later` is the same walk and starts with no less alive. Walks of the same size differ only in what
// the losses so far have added.
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
  for (const Span& span : recompute.spans)
    if (span.phase == StepPhase::kRecompute)
      for (const OpRecord& op : span.ops)
        costs.recompute_flops[static_cast<size_t>(span.segment)] +=
            op.flops * static_cast<double>(span.times);
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
  StepTrace mixed = recompute;
  mixed.spans.clear();
  size_t kept = 0;  // index in `keep`, which lacks only the spans that recompute
  for (const Span& span : recompute.spans) {
    const bool keeps =
        span.segment >= 0 && choices[static_cast<size_t>(span.segment)].activations == Activations::kKeep;
    const bool recomputes = span.phase == StepPhase::kRecompute;
    if (!keeps || !recomputes) mixed.spans.push_back(keeps ? keep.spans.at(kept) : span);
    if (!recomputes) ++kept;
  }
  for (Span& span : mixed.spans) {
    span.events.clear();
    for (Span::Call& call : span.calls) call.before_event = 0;
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
