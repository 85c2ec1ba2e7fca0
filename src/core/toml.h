// Recipes: flat TOML files. Torch-free.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace kiln {

struct TomlEntry {
  std::string key;
  nlohmann::json value;  // string, integer, float, boolean, or an array of these
  int line = 0;
};

// [name], or one of several [[name]].
struct TomlTable {
  std::string name{};  // "": what stands before the first table
  std::vector<TomlEntry> entries{};
  int line = 0;
};
struct TomlDocument {
  std::vector<TomlEntry> entries;  // outside of tables
  std::vector<TomlTable> tables;   // both in line order
};

// Parses a TOML 1.0 document of `key = value` lines and [[tables]] of such lines. Throws Error naming `name`
// and the line for invalid TOML and for what no option takes: single or nested tables, dates, nested arrays.
TomlDocument parse_toml_document(std::string_view text, const std::string& name);
TomlDocument read_toml_document(const std::string& path);
// The same for a document without tables; tables are refused.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);
std::vector<TomlEntry> read_toml(const std::string& path);

// Reads a document of [tables], in line order. The first table has no name. Throws Error like parse_toml(),
// and for tables within tables.
std::vector<TomlTable> read_toml_tables(const std::string& path);

}  // namespace kiln
