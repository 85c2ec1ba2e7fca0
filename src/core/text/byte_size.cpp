#include "core/text/byte_size.h"

#include <charconv>
#include <map>

namespace kiln {

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
