// For measurements: the median, and processor time. Torch-free.
#pragma once
#include <algorithm>
#include <cstddef>
#include <ctime>
#include <vector>

namespace kiln {

// Returns the middle value; of an even number of values, the upper of the two. REQUIRES: values is not empty.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Returns the processor's time of this thread, which other programs do not lengthen by taking turns.
inline double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace kiln
