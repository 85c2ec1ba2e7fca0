#include "plan/memory/device_memory.h"

#include <algorithm>

namespace kiln {

namespace {

constexpr int kPlayShift = 48;  // ids of a trace are below 2^48

}  // namespace

DeviceTimeline::DeviceTimeline(bool caching, int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {
  if (caching) replay_ = std::make_unique<CachingAllocatorReplay>(capacity_bytes);
}

void DeviceTimeline::apply(const MemoryEvent& event, Peak& peak, int64_t stream) {
  const uint64_t id = event.id + (plays_ << kPlayShift);
  live_ += event.bytes;
  peak.live_bytes = std::max(peak.live_bytes, live_);
  if (!replay_) {
    peak.reserved_bytes = peak.live_bytes;
    out_of_memory_ |= capacity_bytes_ > 0 && live_ > capacity_bytes_;
  } else if (event.bytes < 0) {
    replay_->free(id);
  } else {
    out_of_memory_ |= !replay_->allocate(id, event.bytes, stream);
    peak.reserved_bytes = std::max(peak.reserved_bytes, replay_->reserved_bytes());
  }
}

DeviceTimeline::Peak DeviceTimeline::begin_play() {
  ++plays_;
  return {.live_bytes = live_, .reserved_bytes = replay_ ? replay_->reserved_bytes() : live_};
}

DeviceTimeline::Peak DeviceTimeline::play(const MemoryEvents& events) {
  Peak peak = begin_play();
  for (const MemoryEvent& event : events) apply(event, peak);
  return peak;
}

DeviceTimeline::Peak DeviceTimeline::play(const std::vector<Span>& spans, bool update_beside) {
  Peak peak = begin_play();
  for (const Span& span : spans)
    for (const MemoryEvent& event : span.events)
      apply(event, peak, update_beside && span.phase == StepPhase::kOptimizer ? 1 : 0);
  return peak;
}

}  // namespace kiln
