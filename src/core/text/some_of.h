// Long lists in messages of one line. Torch-free.
#pragma once
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace kiln {

// Returns "a, b, c and 481 more".
template <class List = std::vector<std::string>>
std::string some_of(const List& items, const char* separator = ", ") {
  constexpr int64_t kMostShown = 3;
  const int64_t count = std::ssize(items), shown = std::min(count, kMostShown);
  std::string text = fmt::format("{}", fmt::join(items.begin(), std::next(items.begin(), shown), separator));
  if (count > shown) text += fmt::format(" and {} more", count - shown);
  return text;
}

}  // namespace kiln
