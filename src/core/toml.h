// Recipes: flat TOML files. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

struct TomlEntry {
  std::string key;
  nlohmann::json value;  // string, integer, float, boolean, or an array of these
  int line = 0;
};

// The `key = value` lines of a TOML 1.0 document in their order. Throws Error naming `name` and the line for
// what is not TOML and for what no option takes: tables, dates, nested arrays.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);
std::vector<TomlEntry> read_toml(const std::string& path);

}  // namespace kiln
