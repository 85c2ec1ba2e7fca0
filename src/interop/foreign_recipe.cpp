#include "interop/foreign_recipe.h"

#include <filesystem>

#include "core/error.h"
#include "core/files/text_file.h"
#include "core/text/json_text.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPython = ".py";

// Reads a config and those that its _base_ names beside it, which may name others. Adds to `missing` those
// that are not there.
nlohmann::json with_bases(const fs::path& path, int level, std::vector<std::string>& missing) {
  constexpr int kMostLevels = 8;
  if (level > kMostLevels)
    fail("recipe", "{}: _base_ leads through more than {} files", path.string(), kMostLevels);
  const nlohmann::json config = parse_python_config(read_text_file("recipe", path.string()), path.string());
  const nlohmann::json named = config.value("_base_", nlohmann::json::array());
  nlohmann::json bases = nlohmann::json::object();
  for (const nlohmann::json& name : named.is_array() ? named : nlohmann::json::array({named})) {
    if (!name.is_string())
      fail("recipe", "{}: _base_ expects names of files, got {}", path.string(), brief(named));
    const fs::path base = path.parent_path() / name.get<std::string>();
    if (fs::exists(base))
      bases = inherit_python_config(bases, with_bases(base, level + 1, missing));
    else
      missing.push_back(base.string());
  }
  return inherit_python_config(bases, config);
}

}  // namespace

bool is_foreign_recipe(const std::string& path) {
  const std::string ending = fs::path(path).extension().string();
  return ending == ".yaml" || ending == ".yml" || ending == kPython;
}

ForeignRecipe read_foreign_recipe(const std::string& path, const ForeignContext& context) {
  if (fs::path(path).extension() != kPython)
    return parse_sana_recipe(read_text_file("recipe", path), path, context);
  std::vector<std::string> missing;
  ForeignRecipe recipe = translate_pixart_recipe(with_bases(path, 1, missing), path, context);
  for (const std::string& base : missing)
    recipe.notes.push_back(base + " (_base_) is not there: PixArt's own base config is read instead");
  return recipe;
}

}  // namespace kiln
