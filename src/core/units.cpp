#include "core/units.h"

#include <fmt/format.h>

#include <cmath>

namespace kiln {

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(seconds));
  if (total >= 86400) return fmt::format("{}d {:02}h", total / 86400, total / 3600 % 24);
  if (total >= 3600) return fmt::format("{}h {:02}m", total / 3600, total / 60 % 60);
  return fmt::format("{}m {:02}s", total / 60, total % 60);
}

}  // namespace kiln
