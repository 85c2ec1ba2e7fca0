// Spans of time as people read them. Torch-free.
#pragma once
#include <string>

namespace kiln {

inline constexpr double kSecondsPerDay = 86400;

// "5m 03s", "2h 05m", "3d 04h": of progress lines.
std::string duration_text(double seconds);

}  // namespace kiln
