// When an update writes the weights that compute around the caches.
#pragma once
#include <cstdint>

namespace kiln::ops {

// Elements of a tensor; fewer stay in the caches for the next forward.
inline constexpr int64_t kStreamedElements = int64_t{1} << 20;

}  // namespace kiln::ops
