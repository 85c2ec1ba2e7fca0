// A device's memory over the phases of a run, in order: what is alive, and on CUDA what the caching allocator
// reserves for it.
#pragma once
#include <cstdint>
#include <memory>

#include "plan/memory/caching_allocator.h"
#include "step/span.h"

namespace kiln {

class DeviceTimeline {
 public:
  // `caching`: replays CUDA's allocator. `capacity_bytes`: what is left for it; 0: unlimited.
  DeviceTimeline(bool caching, int64_t capacity_bytes);

  // The most during some events, with what lives on from earlier ones.
  struct Peak {
    int64_t live_bytes = 0;      // as asked for
    int64_t reserved_bytes = 0;  // equal to live_bytes without a caching allocator
  };
  Peak play(const MemoryEvents& events);
  // `update_beside`: the optimizer's blocks belong to another stream, and no others serve it.
  Peak play(const std::vector<Span>& spans, bool update_beside);
  bool out_of_memory() const { return out_of_memory_; }

 private:
  Peak begin_play();
  void apply(const MemoryEvent& event, Peak& peak, int64_t stream = 0);

  std::unique_ptr<CachingAllocatorReplay> replay_;
  int64_t capacity_bytes_ = 0, live_ = 0;
  uint64_t plays_ = 0;  // each play has ids of its own, as the same events may be played again
  bool out_of_memory_ = false;
};

}  // namespace kiln
