#include "core/toml.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"

namespace kiln {

namespace {

[[noreturn]] void refuse(const std::string& name, const toml::source_region& where, std::string_view what) {
  fail("toml", "{} line {}: {}", name, where.begin.line, what);
}

nlohmann::json scalar_of(const toml::node& node, const std::string& name) {
  if (const auto* value = node.as_string()) return value->get();
  if (const auto* value = node.as_integer()) return value->get();
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_boolean()) return value->get();
  refuse(name, node.source(), "expected a string, a number, true, false or an array of these");
}

nlohmann::json value_of(const toml::node& node, const std::string& name) {
  const toml::array* elements = node.as_array();
  if (!elements) return scalar_of(node, name);
  nlohmann::json array = nlohmann::json::array();
  for (const toml::node& element : *elements) array.push_back(scalar_of(element, name));
  return array;
}

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  std::vector<TomlEntry> entries;
  try {
    for (const auto& [key, node] : toml::parse(text, name)) {
      if (node.is_table() || node.is_array_of_tables())
        refuse(name, node.source(), "tables are not supported: recipes are flat lists of options");
      entries.push_back({.key = std::string(key.str()),
                         .value = value_of(node, name),
                         .line = static_cast<int>(key.source().begin.line)});
    }
  } catch (const toml::parse_error& error) {
    refuse(name, error.source(), error.description());
  }
  std::ranges::sort(entries, {}, &TomlEntry::line);
  return entries;
}

std::vector<TomlEntry> read_toml(const std::string& path) {
  std::error_code unreachable;  // then opening it tells why
  if (std::filesystem::is_directory(path, unreachable))
    fail("toml", "cannot read {}: it is a folder, a file is needed", path);
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("toml", "cannot read {}: {}", path, std::strerror(errno));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return parse_toml(text, path);
}

}  // namespace kiln
