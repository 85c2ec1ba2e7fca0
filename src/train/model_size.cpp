#include "train/model_size.h"

#include <fmt/ranges.h>

#include "models/registry.h"

namespace kiln {

std::string unnamed_size(const ModelOptions& options, const nlohmann::json& config) {
  const Family& family = family_of(options.name);
  const bool has_size = options.hidden_size > 0 || options.depth > 0 || options.num_heads > 0 ||
                        options.patch_size > 0 || !options.config.empty();
  if (options.name != family.name || has_size) return "";
  std::vector<std::string> sizes;
  for (const auto& [name, preset] : family.presets())
    if (name != family.name) sizes.push_back(name);
  if (sizes.empty()) return "";
  const std::string own = preset_name(family, config);
  return fmt::format(
      "--model {} without a size is as large as {}: name a size ({}), or give --hidden-size and --depth",
      options.name, own == family.name ? "the largest published one" : own, fmt::join(sizes, ", "));
}

}  // namespace kiln
