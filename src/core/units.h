// Bytes and spans of time in units for people. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

inline constexpr int64_t kMiB = 1 << 20;
inline constexpr double kGiB = 1 << 30;
inline double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

inline constexpr double kSecondsPerDay = 86400;

// "5m 03s", "2h 05m", "3d 04h": for progress lines.
std::string duration_text(double seconds);

}  // namespace kiln
