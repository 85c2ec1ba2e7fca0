// The order of samples: position in the global stream -> sample, as a pure function. Torch-free.
#pragma once
#include <cstdint>

namespace kiln {

// The image of `index` under a permutation of [0, size) chosen by (seed, epoch). O(1) time and memory: a
// Feistel network on Philox over the next power of two, walked until it lands inside (Black and Rogaway
// 2002).
int64_t shuffled_index(uint64_t seed, int64_t epoch, int64_t size, int64_t index);

}  // namespace kiln
