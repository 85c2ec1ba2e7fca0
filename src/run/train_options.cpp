#include "run/train_options.h"

#include <charconv>

#include "core/error.h"
#include "core/units.h"
#include "run/memory_options.h"

namespace kiln {

StepRange StepRange::parse(const std::string& text) {
  if (text.empty()) return {};
  const auto parse = [](std::string_view part, int64_t& value) {
    const auto [rest, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    return error == std::errc() && rest == part.data() + part.size();
  };
  StepRange steps;
  const size_t colon = text.find(':');
  const std::string_view all = text;
  if (colon == std::string::npos || !parse(all.substr(0, colon), steps.first) ||
      !parse(all.substr(colon + 1), steps.last) || steps.first < 1 || steps.last < steps.first)
    fail("train", "--profile expects FROM:TO, steps from 1 on with FROM not after TO (10:12), got '{}'",
         text);
  return steps;
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
