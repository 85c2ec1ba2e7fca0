#include "run/train_options.h"

#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/units.h"
#include "run/memory_options.h"

namespace kiln {

StepRange StepRange::parse(const std::string& text) {
  if (text.empty()) return {};
  const std::string_view all = text;
  const size_t colon = all.find(':');
  const auto first = whole_number(all.substr(0, colon));
  const auto last = colon == all.npos ? std::nullopt : whole_number(all.substr(colon + 1));
  if (!first || !last || *first < 1 || *last < *first)
    fail("train", "--profile expects FROM:TO, steps from 1 on with FROM not after TO (10:12), got '{}'",
         text);
  return {.first = *first, .last = *last};
}

std::string StepRange::text() const { return empty() ? "" : fmt::format("{}:{}", first, last); }

int64_t MemoryBudget::parse_size(const char* option, const std::string& text) {
  const int64_t bytes = byte_size(text);
  if (bytes == 0) fail("plan", "--{} expects a size such as 12G, 11.5GiB or 800M, got '{}'", option, text);
  return bytes;
}

MemoryBudget MemoryBudget::parse(const std::string& text) {
  MemoryBudget budget;
  budget.text_ = text;
  if (text.empty() || text == "auto") return budget;
  budget.bytes_ = byte_size(text);
  if (budget.bytes_ == 0)
    fail("train", "--memory-budget expects auto or a size such as 12G, 11.5GiB or 800M, got '{}'", text);
  return budget;
}

}  // namespace kiln
