#include "plan/device_memory.h"

#include <algorithm>
#include <numeric>

namespace kiln {

namespace {

constexpr int kPlayShift = 48;  // ids of a trace count from small numbers

}  // namespace

DeviceTimeline::DeviceTimeline(bool caching, int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {
  if (caching) replay_ = std::make_unique<CachingAllocatorReplay>(capacity_bytes);
}

void DeviceTimeline::apply(uint64_t id, int64_t bytes, Peak& peak) {
  id += plays_ << kPlayShift;
  live_ += bytes;
  peak.live_bytes = std::max(peak.live_bytes, live_);
  if (!replay_) {
    peak.reserved_bytes = peak.live_bytes;
    out_of_memory_ |= capacity_bytes_ > 0 && live_ > capacity_bytes_;
  } else if (bytes < 0) {
    replay_->free(id);
  } else {
    out_of_memory_ |= !replay_->allocate(id, bytes);
    peak.reserved_bytes = std::max(peak.reserved_bytes, replay_->reserved_bytes());
  }
}

DeviceTimeline::Peak DeviceTimeline::play(const DeviceEvents& events) {
  ++plays_;
  Peak peak{.live_bytes = live_, .reserved_bytes = replay_ ? replay_->reserved_bytes() : live_};
  for (const DeviceEvent& event : events) apply(event.id, event.bytes, peak);
  return peak;
}

DeviceTimeline::Peak DeviceTimeline::play_step(const std::vector<MemoryEvent>& events,
                                               int64_t transient_bytes) {
  ++plays_;
  constexpr uint64_t kTransient = 0;  // traces count from 1
  Peak peak{.live_bytes = live_, .reserved_bytes = replay_ ? replay_->reserved_bytes() : live_};
  if (transient_bytes > 0) apply(kTransient, transient_bytes, peak);
  for (const MemoryEvent& event : events) apply(event.id, event.bytes, peak);
  if (transient_bytes > 0) apply(kTransient, -transient_bytes, peak);
  return peak;
}

DeviceEvents sharded_load(const StepTrace& trace, const RankState& state) {
  const auto& units = trace.segment_weights;
  const int64_t whole = std::accumulate(units.begin(), units.end(), int64_t{0});
  DeviceEvents events;
  uint64_t next_id = 1;
  const auto allocate = [&](int64_t bytes) { events.push_back({.id = next_id++, .bytes = bytes}); };
  for (int64_t unit : units) allocate(4 * unit);
  std::map<MemoryKind, int64_t> left = state.device;
  for (size_t i = 0; i < units.size(); ++i) {
    const bool last = i + 1 == units.size();
    for (auto& [kind, bytes] : left) {
      const int64_t part =
          last ? bytes : static_cast<int64_t>(static_cast<double>(state.device.at(kind)) * units[i] / whole);
      if (part > 0) allocate(part);
      bytes -= part;
    }
    events.push_back({.id = i + 1, .bytes = -4 * units[i]});
  }
  return events;
}

}  // namespace kiln
