#include "core/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>

namespace kiln {

std::string gib_text(int64_t bytes) { return fmt::format("{:.{}f}", gib(bytes), gib(bytes) < 0.1 ? 3 : 2); }

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(seconds));
  if (total >= 86400) return fmt::format("{}d {:02}h", total / 86400, total / 3600 % 24);
  if (total >= 3600) return fmt::format("{}h {:02}m", total / 3600, total / 60 % 60);
  return fmt::format("{}m {:02}s", total / 60, total % 60);
}

std::string number_text(double value, int digits) {
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (std::abs(value) < 1e-12) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(std::abs(value))));
  const double unit = std::pow(10, exponent + 1 - digits);
  const double rounded = unit > 1 ? std::round(value / unit) * unit : value;
  std::string text = fmt::format("{:.{}f}", rounded, std::max(0, digits - 1 - exponent));
  const size_t point = std::min(text.find('.'), text.size());
  if (point < text.size()) text.erase(std::max(point, text.find_last_not_of("0.") + 1));
  for (size_t i = point; i > 3 && std::isdigit(static_cast<unsigned char>(text[i - 4])); i -= 3)
    text.insert(i - 3, ",");
  return text;
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && rest == text.data() + text.size() ? std::optional(number) : std::nullopt;
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
