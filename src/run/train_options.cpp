#include "run/train_options.h"

#include <charconv>

#include "core/error.h"

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

}  // namespace kiln
