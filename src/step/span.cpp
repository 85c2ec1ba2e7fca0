#include "step/span.h"

#include <algorithm>

namespace kiln {

std::string_view name_of(MemoryKind kind) {
  constexpr std::string_view kNames[kNumMemoryKinds] = {
      "weights",     "gradients",    "master",      "moments", "ema",        "constants",
      "autoencoder", "text encoder", "feature net", "staging", "gathered",   "batch",
      "activations", "recompute",    "attention",   "matmul",  "temporaries"};
  return kNames[static_cast<size_t>(kind)];
}

int64_t peak_bytes(const MemoryEvents& events) {
  int64_t live = 0, peak = 0;
  for (const MemoryEvent& event : events) peak = std::max(peak, live += event.bytes);
  return peak;
}

int64_t left_bytes(const MemoryEvents& events) {
  int64_t live = 0;
  for (const MemoryEvent& event : events) live += event.bytes;
  return live;
}

std::vector<OpRecord> ops_of(const std::vector<Span>& spans) {
  std::vector<OpRecord> ops;
  for (const Span& span : spans) ops.insert(ops.end(), span.ops.begin(), span.ops.end());
  return ops;
}

// The peak of the step is the first moment of the highest sum.
void find_bytes(RecordedStep& step) {
  StepMemory& memory = step.memory;
  int64_t live = memory.persistent_bytes;
  size_t num_events = 0, num_until_peak = 0;
  memory.peak_bytes = live;
  for (Span& span : step.spans) {
    span.peak_bytes = live;
    for (const MemoryEvent& event : span.events) {
      live += event.bytes;
      ++num_events;
      span.peak_bytes = std::max(span.peak_bytes, live);
      if (live <= memory.peak_bytes) continue;
      memory.peak_bytes = live;
      memory.peak_phase = span.phase;
      memory.peak_segment = span.segment;
      num_until_peak = num_events;
    }
    span.live_bytes = live;
  }
  memory.peak_by_kind = memory.persistent;
  for (const Span& span : step.spans)
    for (const MemoryEvent& event : span.events)
      if (num_until_peak > 0) --num_until_peak, memory.peak_by_kind[event.kind] += event.bytes;
  std::erase_if(memory.peak_by_kind, [](const auto& entry) { return entry.second == 0; });
}

}  // namespace kiln
