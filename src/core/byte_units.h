// Bytes in units for people. Torch-free.
#pragma once
#include <cstdint>

namespace kiln {

inline constexpr int64_t kMiB = 1 << 20;
inline constexpr double kGiB = 1 << 30;
inline double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

}  // namespace kiln
