#include "plan/trace_parts.h"

#include <algorithm>

namespace kiln {

namespace {

// [begin, end) of those of `items` from `next` on that are inside `mark`.
template <class Item>
std::pair<size_t, size_t> range_of(const MemoryMark& mark, const std::vector<Item>& items, size_t next) {
  const auto is_inside = [&](const Item& item) {
    return item.phase == mark.phase && item.segment == mark.segment;
  };
  while (next < items.size() && items[next].segment < 0 && !is_inside(items[next])) ++next;
  const size_t begin = next;
  while (next < items.size() && is_inside(items[next])) ++next;
  return {begin, next};
}

}  // namespace

std::vector<TracePart> parts_of(const StepTrace& trace) {
  std::vector<TracePart> parts;
  size_t op = 0, event = 0;
  for (const MemoryMark& mark : trace.memory.marks) {
    TracePart& part = parts.emplace_back();
    // A mark without operations must not swallow those that follow.
    const auto [ops_begin, ops_end] = range_of(mark, trace.ops, op);
    part.ops_begin = ops_begin == ops_end ? op : ops_begin;
    part.ops_end = op = ops_begin == ops_end ? op : ops_end;
    const auto [events_begin, events_end] = range_of(mark, trace.memory.events, event);
    part.events_begin = events_begin == events_end ? event : events_begin;
    part.events_end = event = events_begin == events_end ? event : events_end;
  }
  return parts;
}

std::vector<size_t> micro_steps_of(const StepTrace& trace) {
  const std::vector<MemoryMark>& marks = trace.memory.marks;
  std::vector<size_t> begins;
  for (size_t i = 0; i < marks.size(); ++i) {
    const bool is_input = marks[i].phase == StepPhase::kInput;
    if (is_input && (i == 0 || marks[i - 1].phase != StepPhase::kInput)) begins.push_back(i);
    const bool ends_walks = marks[i].phase == StepPhase::kGradNorm ||
                            (marks[i].phase == StepPhase::kCommunication && marks[i].segment < 0);
    if (ends_walks) {
      begins.push_back(i);
      return begins;
    }
  }
  begins.push_back(marks.size());
  return begins;
}

void find_mark_bytes(StepTrace& trace) {
  int64_t live = trace.memory.persistent_bytes;
  const std::vector<TracePart> parts = parts_of(trace);
  size_t event = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    MemoryMark& mark = trace.memory.marks[i];
    for (; event < parts[i].events_begin; ++event) live += trace.memory.events[event].bytes;
    mark.peak_bytes = live;
    for (; event < parts[i].events_end; ++event) {
      live += trace.memory.events[event].bytes;
      mark.peak_bytes = std::max(mark.peak_bytes, live);
    }
    mark.live_bytes = live;
  }
}

}  // namespace kiln
