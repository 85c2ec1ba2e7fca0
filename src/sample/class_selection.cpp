#include "sample/class_selection.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "core/error.h"

namespace kiln {
namespace {

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// Levenshtein distance, capitals aside; a name that contains the other is near whatever their lengths.
int64_t distance(const std::string& a, const std::string& b) {
  if (!a.empty() && b.find(a) != std::string::npos) return 1;
  std::vector<int64_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int64_t diagonal = row[0]++;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::optional<int64_t> parse_number(const std::string& text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || rest != text.data() + text.size()) return std::nullopt;
  return number;
}

int64_t select_class(const std::string& wanted, const std::vector<std::string>& names, int64_t num_classes) {
  for (size_t i = 0; i < names.size(); ++i)
    if (lower(names[i]) == lower(wanted)) return static_cast<int64_t>(i);
  if (const std::optional<int64_t> number = parse_number(wanted)) {
    if (*number >= 0 && *number < num_classes) return *number;
    fail("sample", "expected --classes in 0..{}, got {}", num_classes - 1, *number);
  }
  if (names.empty())
    fail("sample", "expected --classes as numbers in 0..{}, got \"{}\": this model has no class names",
         num_classes - 1, wanted);
  fail("sample", "no class is called \"{}\": the nearest are {}", wanted,
       fmt::join(nearest_names(wanted, names, 3), ", "));
}

}  // namespace

std::vector<int64_t> select_classes(const std::vector<std::string>& selection,
                                    const std::vector<std::string>& class_names, int64_t num_classes) {
  if (num_classes == 0) {
    if (!selection.empty()) fail("sample", "--classes has no meaning for this model: it knows no classes");
    return {0};
  }
  std::vector<int64_t> classes;
  if (selection.empty() || (selection.size() == 1 && selection[0] == "all")) {
    classes.resize(static_cast<size_t>(num_classes));
    std::iota(classes.begin(), classes.end(), 0);
    return classes;
  }
  for (const std::string& wanted : selection)
    classes.push_back(select_class(wanted, class_names, num_classes));
  return classes;
}

std::vector<std::string> nearest_names(const std::string& name, const std::vector<std::string>& names,
                                       size_t count) {
  std::vector<std::pair<int64_t, size_t>> ranked;
  for (size_t i = 0; i < names.size(); ++i) ranked.emplace_back(distance(lower(name), lower(names[i])), i);
  std::ranges::sort(ranked);
  std::vector<std::string> nearest;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) nearest.push_back(names[ranked[i].second]);
  return nearest;
}

}  // namespace kiln
