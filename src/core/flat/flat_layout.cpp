#include "core/flat/flat_layout.h"

namespace kiln {

void FlatLayout::add(const std::string& key, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (int64_t extent : shape) numel *= extent;
  slots.push_back({.key = key, .shape = shape, .offset = size, .numel = numel});
  size = round_up(size + numel, alignment);
}

}  // namespace kiln
