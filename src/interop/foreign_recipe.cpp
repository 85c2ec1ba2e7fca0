#include "interop/foreign_recipe.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "interop/python_config.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPython = ".py";

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || fs::is_directory(path)) fail("recipe", "cannot read {}", path);
  return text;
}

// Returns the text of the config that _base_ names beside the file, or "" if it is not there.
std::string base_of(const std::string& text, const std::string& path) {
  const nlohmann::json config = parse_python_config(text, path);
  if (!config.contains("_base_")) return "";
  const nlohmann::json names =
      config["_base_"].is_array() ? config["_base_"] : nlohmann::json{config["_base_"]};
  if (names.size() != 1 || !names[0].is_string())
    fail("recipe", "{}: _base_ expects the name of one file, got {}", path, config["_base_"].dump());
  const fs::path base = fs::path(path).parent_path() / names[0].get<std::string>();
  return fs::exists(base) ? content_of(base.string()) : "";
}

}  // namespace

bool is_foreign_recipe(const std::string& path) {
  const std::string ending = fs::path(path).extension().string();
  return ending == ".yaml" || ending == ".yml" || ending == kPython;
}

ForeignRecipe read_foreign_recipe(const std::string& path, const ForeignContext& context) {
  const std::string text = content_of(path);
  if (fs::path(path).extension() != kPython) return parse_sana_recipe(text, path, context);
  return parse_pixart_recipe(text, base_of(text, path), path, context);
}

}  // namespace kiln
