// Processor time. Torch-free.
#pragma once
#include <ctime>

namespace kiln {

// Returns the processor's time of this thread, which other programs do not lengthen by taking turns.
inline double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace kiln
