#include "parallel/untried_gpu.h"

#include <fmt/ranges.h>

#include "core/text/split.h"

namespace kiln {

UntriedGpu UntriedGpu::parse(const std::string& text) {
  UntriedGpu parsed;
  if (text == "none") return parsed;
  const std::vector<std::string> names = text == "all" ? choice_names<Untried>() : split(text, ',');
  for (const std::string& name : names)
    parsed.ways_.insert(parse_choice<Untried>("train", "--untried-gpu", name));
  return parsed;
}

std::string UntriedGpu::text() const {
  if (is_none()) return "none";
  if (ways_.size() == std::size(Choices<Untried>::kAll)) return "all";
  std::vector<std::string> names;
  for (const Untried way : ways_) names.push_back(choice_name(way));
  return fmt::format("{}", fmt::join(names, ","));
}

}  // namespace kiln
