#include "plan/trace_family.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace kiln {

namespace {

// A pass of one image is another program: what would be broadcast over a batch has its shape already.
constexpr int64_t kLowImages = 2, kLeastHighImages = 8;

constexpr int64_t kTracedPasses = 3;  // the first, the last, and one that stands for all between

// The line through the two traces.
class Line {
 public:
  Line(int64_t low, int64_t high, int64_t images) : from_(images - low), span_(high - low) {}

  int64_t operator()(int64_t low, int64_t high) const { return low + (high - low) * from_ / span_; }
  double operator()(double low, double high) const {
    return low + (high - low) * static_cast<double>(from_) / static_cast<double>(span_);
  }

 private:
  int64_t from_, span_;
};

void compose_ops(std::vector<OpRecord>& ops, const std::vector<OpRecord>& high, const Line& line) {
  for (size_t i = 0; i < ops.size(); ++i) {
    OpRecord& op = ops[i];
    if (op.name != high[i].name || op.phase != high[i].phase || op.segment != high[i].segment)
      fail("plan", "operation {} of two traces of one step is {} and {}", i, op.name, high[i].name);
    op.flops = line(op.flops, high[i].flops);
    op.bytes = line(op.bytes, high[i].bytes);
    op.m = line(op.m, high[i].m);
    op.n = line(op.n, high[i].n);
    op.k = line(op.k, high[i].k);
  }
}

// Which of the events are inside `mark`, from `next` on. Events between two phases have the segment -1, or
// follow a phase without one and count to it.
std::pair<size_t, size_t> events_of(const MemoryMark& mark, const std::vector<MemoryEvent>& events,
                                    size_t next) {
  const auto is_inside = [&](const MemoryEvent& event) {
    return event.phase == mark.phase && event.segment == mark.segment;
  };
  const auto is_between = [&](const MemoryEvent& event) { return event.segment < 0 && !is_inside(event); };
  while (next < events.size() && is_between(events[next])) ++next;
  const size_t begin = next;
  while (next < events.size() && is_inside(events[next])) ++next;
  return {begin, next};
}

// The highest live bytes inside each mark.
void find_mark_peaks(StepMemory& memory) {
  int64_t live = memory.persistent_bytes;
  size_t next = 0;
  for (MemoryMark& mark : memory.marks) {
    const auto [begin, end] = events_of(mark, memory.events, next);
    for (; next < begin; ++next) live += memory.events[next].bytes;
    mark.peak_bytes = live;
    for (; next < end; ++next) {
      live += memory.events[next].bytes;
      mark.peak_bytes = std::max(mark.peak_bytes, live);
    }
  }
}

void compose_events(StepMemory& memory, const StepMemory& high, const Line& line) {
  for (size_t i = 0; i < memory.events.size(); ++i) {
    MemoryEvent& event = memory.events[i];
    if (event.phase != high.events[i].phase || event.segment != high.events[i].segment)
      fail("plan", "allocation {} of two traces of one step is in {} and {}", i, name_of(event.phase),
           name_of(high.events[i].phase));
    event.bytes = line(event.bytes, high.events[i].bytes);
  }
  find_peak(memory);
  for (size_t i = 0; i < memory.marks.size(); ++i)
    memory.marks[i].live_bytes = line(memory.marks[i].live_bytes, high.marks[i].live_bytes);
  find_mark_peaks(memory);
}

// What passes leave behind until the step ends, a few bytes per image, is that of kTracedPasses.
StepTrace of_passes(StepTrace trace, int64_t num_passes) {
  const auto [first, last] = second_micro_step(trace.ops);
  if (num_passes < kTracedPasses)
    trace.ops.erase(trace.ops.begin() + static_cast<int64_t>(first),
                    trace.ops.begin() + static_cast<int64_t>(last));
  else
    for (size_t i = first; i < last; ++i) trace.ops[i].times += num_passes - kTracedPasses;
  return trace;
}

}  // namespace

StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images) {
  if (low.ops.size() != high.ops.size() || low.memory.events.size() != high.memory.events.size() ||
      low.memory.marks.size() != high.memory.marks.size())
    fail("plan", "traces of passes of {} and {} images differ in more than their sizes", low_images,
         high_images);
  StepTrace trace = low;
  const Line line(low_images, high_images, images);
  compose_ops(trace.ops, high.ops, line);
  compose_events(trace.memory, high.memory, line);
  return trace;
}

TraceFamily::TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                         int64_t most_images)
    : options_(options),
      data_(data),
      device_(device),
      low_(kLowImages),
      high_(std::max(most_images, kLeastHighImages)) {
  options_.zero_stage = 0;
  options_.offload_optimizer = options_.offload_params = "none";
}

const StepTrace& TraceFamily::traced(int64_t images, int64_t num_passes) {
  const auto key = std::pair{images, num_passes};
  if (const auto known = traces_.find(key); known != traces_.end()) return known->second;
  TrainOptions options = options_;
  options.micro_batch = images;
  options.global_batch = images * num_passes;
  return traces_.emplace(key, trace_step(options, data_, device_)).first->second;
}

const StepTrace& TraceFamily::at(int64_t images, int64_t num_passes) {
  const auto key = std::pair{images, num_passes};
  if (const auto known = traces_.find(key); known != traces_.end()) return known->second;
  if (num_passes > 1 && num_passes != kTracedPasses)
    return traces_.emplace(key, of_passes(at(images, kTracedPasses), num_passes)).first->second;
  if (images < low_) return traced(images, num_passes);
  const StepTrace &low = traced(low_, num_passes), &high = traced(high_, num_passes);
  if (images == low_ || images == high_) return traces_.at(key);
  return traces_.emplace(key, compose_trace(low, low_, high, high_, images)).first->second;
}

}  // namespace kiln
