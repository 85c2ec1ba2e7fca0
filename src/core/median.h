// The middle of some values. Torch-free.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace kiln {

// The upper one of an even number. REQUIRES: there are some.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace kiln
