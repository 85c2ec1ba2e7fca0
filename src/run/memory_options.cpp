#include "run/memory_options.h"

#include <charconv>
#include <map>

#include "core/error.h"

namespace kiln {

namespace {

// 0 for what is no size.
int64_t bytes_of(const std::string& text) {
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

}  // namespace

int64_t MemoryBudget::parse_size(const char* option, const std::string& text) {
  const int64_t bytes = bytes_of(text);
  if (bytes == 0) fail("plan", "--{} expects a size such as 12G, 11.5GiB or 800M, got '{}'", option, text);
  return bytes;
}

MemoryBudget MemoryBudget::parse(const std::string& text) {
  MemoryBudget budget;
  budget.text_ = text;
  if (text.empty() || text == "auto") return budget;
  budget.bytes_ = bytes_of(text);
  if (budget.bytes_ == 0)
    fail("train", "--memory-budget expects auto or a size such as 12G, 11.5GiB or 800M, got '{}'", text);
  return budget;
}

}  // namespace kiln
