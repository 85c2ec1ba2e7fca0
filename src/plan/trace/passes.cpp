#include "plan/trace/passes.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace kiln {

namespace {

constexpr int kCopyShift = 44;  // ids of a trace are below 2^44

class StepComposer {
 public:
  explicit StepComposer(const std::vector<Pass>& passes) : passes_(passes) {}

  RecordedStep run(const RecordedStep& end) {
    step_.memory = end.memory;
    for (size_t i = 0; i < passes_.size(); ++i)
      for (const Span& span : passes_[i].from->spans)
        if (span.micro_step == passes_[i].micro_step) add(span, i);
    for (const Span& span : end.spans)
      if (!span.in_micro_step()) {
        add(span, 0);
        step_.spans.back().micro_step = -1;
      }
    for (const auto& [id, made] : alive_)  // frees what passes leave behind
      step_.spans.back().events.push_back(
          {.id = id, .bytes = -made.bytes, .kind = made.kind, .by_call = made.by_call});
    find_bytes(step_);
    return std::move(step_);
  }

 private:
  void add(const Span& span, size_t pass) {
    Span& added = step_.spans.emplace_back(Span{.micro_step = static_cast<int64_t>(pass),
                                                .phase = span.phase,
                                                .segment = span.segment,
                                                .times = span.times,
                                                .by_call = span.by_call,
                                                .ops = span.ops,
                                                .collectives = span.collectives,
                                                .calls = span.calls});
    added.events.reserve(span.events.size());
    size_t call = 0;
    for (size_t i = 0; i <= span.events.size(); ++i) {
      for (; call < span.calls.size() && span.calls[call].before_event == i; ++call)
        added.calls[call].before_event = added.events.size();
      if (i < span.events.size()) add_event(added, span.events[i], static_cast<uint64_t>(pass) << kCopyShift);
    }
  }

  void add_event(Span& span, MemoryEvent event, uint64_t copy) {
    event.id |= copy;
    if (event.bytes > 0)
      alive_[event.id] = event;
    else if (alive_.erase(event.id) == 0)
      return;  // the block is of a pass that is not in this step
    span.events.push_back(event);
  }

  const std::vector<Pass>& passes_;
  RecordedStep step_;
  std::unordered_map<uint64_t, MemoryEvent> alive_;
};

}  // namespace

int64_t own_peak_bytes(RecordedStep step) {
  std::unordered_set<uint64_t> of_calls;
  for (Span& span : step.spans)
    std::erase_if(span.events, [&](const MemoryEvent& event) {
      if (event.by_call && event.bytes > 0) of_calls.insert(event.id);
      return event.by_call || of_calls.contains(event.id);
    });
  find_bytes(step);
  return step.memory.peak_bytes;
}

void fold_equal_passes(RecordedStep& step, int64_t num_whole, int64_t peak_of_one_more) {
  const int64_t left_out = num_whole - kDistinctPasses;
  const int64_t left_behind = left_out * (peak_of_one_more - own_peak_bytes(step));
  uint64_t last_id = 0;
  for (Span& span : step.spans) {
    for (const MemoryEvent& event : span.events) last_id = std::max(last_id, event.id);
    if (span.micro_step == 2) span.times += left_out;
  }
  if (left_behind <= 0) return;
  // What they leave behind becomes one block that lives as long as the step.
  MemoryEvents& first = step.spans.front().events;
  first.insert(first.begin(), {.id = last_id + 1, .bytes = left_behind});
  for (Span::Call& call : step.spans.front().calls) ++call.before_event;
  step.spans.back().events.push_back({.id = last_id + 1, .bytes = -left_behind});
  find_bytes(step);
}

RecordedStep step_of_passes(const std::vector<Pass>& passes, const RecordedStep& end) {
  return StepComposer(passes).run(end);
}

}  // namespace kiln
