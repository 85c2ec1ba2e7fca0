#include "core/text/nearest_name.h"

#include <algorithm>
#include <cctype>

namespace kiln {

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

// Returns the Levenshtein distance, but 1 if b contains a, whatever their lengths.
size_t edit_distance(const std::string& a, const std::string& b) {
  if (a == b) return 0;
  if (!a.empty() && b.find(a) != std::string::npos) return 1;
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count) {
  const std::string wanted = lower(name);
  std::vector<std::pair<size_t, size_t>> ranked;
  for (size_t i = 0; i < names.size(); ++i) ranked.emplace_back(edit_distance(wanted, lower(names[i])), i);
  std::ranges::sort(ranked);
  std::vector<std::string> nearest;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) nearest.push_back(names[ranked[i].second]);
  return nearest;
}

size_t num_edits(std::string_view name, std::string_view other) {
  return edit_distance(lower(name), lower(other));
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& names) {
  const std::vector<std::string> nearest = nearest_names(name, names, 1);
  return nearest.empty() ? "" : nearest.front();
}

}  // namespace kiln
