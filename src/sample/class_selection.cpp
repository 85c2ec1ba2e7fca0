#include "sample/class_selection.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/text/nearest_name.h"

namespace kiln {
namespace {

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
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

}  // namespace kiln
