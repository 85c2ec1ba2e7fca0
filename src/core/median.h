// The median. Torch-free.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace kiln {

// Returns the middle value; of an even number of values, the upper of the two. REQUIRES: values is not empty.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace kiln
