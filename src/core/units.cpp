#include "core/units.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <map>

namespace kiln {

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(seconds));
  if (total >= 86400) return fmt::format("{}d {:02}h", total / 86400, total / 3600 % 24);
  if (total >= 3600) return fmt::format("{}h {:02}m", total / 3600, total / 60 % 60);
  return fmt::format("{}m {:02}s", total / 60, total % 60);
}

int64_t byte_size(const std::string& text) {
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(rest, text.data() + text.size());
  static const std::map<std::string, double> kUnits = {
      {"", 1},         {"K", 0x1p10},   {"KiB", 0x1p10}, {"KB", 1e3},     {"M", 0x1p20},
      {"MiB", 0x1p20}, {"MB", 1e6},     {"G", 0x1p30},   {"GiB", 0x1p30}, {"GB", 1e9},
      {"T", 0x1p40},   {"TiB", 0x1p40}, {"TB", 1e12}};
  const auto found = kUnits.find(unit);
  const double bytes = found == kUnits.end() ? 0 : number * found->second;
  return error != std::errc() || !(bytes >= 1) || bytes > 0x1p60 ? 0 : static_cast<int64_t>(bytes);
}

}  // namespace kiln
