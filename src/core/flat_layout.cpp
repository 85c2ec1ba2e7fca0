#include "core/flat_layout.h"

#include <algorithm>

namespace kiln {

namespace {

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace

void FlatLayout::add(const std::string& key, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (int64_t extent : shape) numel *= extent;
  slots.push_back({.key = key, .shape = shape, .offset = size, .numel = numel});
  size = round_up(size + numel, alignment);
}

StateSlot StateBuffer::slot(const FlatLayout& layout, size_t index) const {
  if (!packed.empty()) return packed.at(index);
  const FlatSlot& slot = layout.slots.at(index);
  if (block == 1) return {.shape = slot.shape, .elements = 1, .values = 1};
  return {.shape = {divide_up(slot.numel, block)}, .elements = block, .values = 1};
}

std::vector<StateRun> state_runs(const StateBuffer& buffer, const FlatLayout& layout, int64_t begin,
                                 int64_t end) {
  std::vector<StateRun> runs;
  int64_t packed_end = 0;
  for (size_t i = 0; i < layout.slots.size(); ++i) {
    const FlatSlot& slot = layout.slots[i];
    const StateSlot kept = buffer.slot(layout, i);
    const int64_t first = std::clamp(begin - slot.offset, int64_t{0}, slot.numel),
                  last = std::clamp(end - slot.offset, int64_t{0}, slot.numel);
    StateRun run;
    if (first < last) {
      const int64_t group = first / kept.elements;
      run = {.first = group * kept.values,
             .place = buffer.packed.empty() ? (slot.offset + first - begin) / buffer.block : packed_end,
             .count = (divide_up(last, kept.elements) - group) * kept.values};
    }
    packed_end += run.count;
    runs.push_back(run);
  }
  return runs;
}

StateRun part_of(const StateRun& run, const StateSlot& kept, int64_t first, int64_t last) {
  const int64_t begin = std::max(run.first, divide_up(first, kept.elements) * kept.values),
                end = std::min(run.first + run.count, divide_up(last, kept.elements) * kept.values);
  return {.first = begin, .place = run.place + begin - run.first, .count = std::max<int64_t>(0, end - begin)};
}

int64_t state_values(const StateBuffer& buffer, const FlatLayout& layout, int64_t size, int64_t shard) {
  if (buffer.packed.empty()) return shard / buffer.block;
  int64_t most = 0;
  for (int64_t begin = 0; begin < size; begin += shard) {
    int64_t values = 0;
    for (const StateRun& run : state_runs(buffer, layout, begin, begin + shard)) values += run.count;
    most = std::max(most, values);
  }
  return most;
}

}  // namespace kiln
