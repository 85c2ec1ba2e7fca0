// The part of TOML that recipes use: flat `key = value` lines. Torch-free.
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

// Comments, bare and quoted keys, basic and literal strings on one line, numbers (with underscores, inf,
// nan), booleans, arrays over any number of lines. Throws Error naming `name` and the line for anything else:
// tables, dates, nested arrays, a key twice, bytes after a value.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);
std::vector<TomlEntry> read_toml(const std::string& path);

}  // namespace kiln
