// Long lists in messages of one line. Torch-free.
#pragma once
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kiln {

// Returns "a, b, c and 481 more".
inline std::string some_of(const std::vector<std::string>& names, const char* separator = ", ") {
  constexpr size_t kMostShown = 3;
  const size_t shown = std::min(names.size(), kMostShown);
  std::string text =
      fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<int64_t>(shown), separator));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace kiln
