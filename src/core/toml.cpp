#include "core/toml.h"

#include <toml++/toml.h>

#include <algorithm>

#include "core/error.h"
#include "core/files/text_file.h"

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

constexpr const char* kNoTables = "tables are not supported here: recipes are flat lists of options";

TomlEntry entry_of(const toml::key& key, const toml::node& node, const std::string& name) {
  return {.key = std::string(key.str()),
          .value = value_of(node, name),
          .line = static_cast<int>(key.source().begin.line)};
}

std::vector<TomlEntry> entries_of(const toml::table& table, const std::string& name,
                                  std::vector<TomlTable>* tables) {
  std::vector<TomlEntry> entries;
  for (const auto& [key, node] : table) {
    const toml::array* array = node.as_array();
    if (tables && array && node.is_array_of_tables()) {
      for (const toml::node& element : *array)
        tables->push_back({.name = std::string(key.str()),
                           .entries = entries_of(*element.as_table(), name, nullptr),
                           .line = static_cast<int>(element.source().begin.line)});
      continue;
    }
    if (node.is_table() || node.is_array_of_tables()) refuse(name, node.source(), kNoTables);
    entries.push_back(entry_of(key, node, name));
  }
  std::ranges::sort(entries, {}, &TomlEntry::line);
  return entries;
}

}  // namespace

std::vector<TomlTable> read_toml_tables(const std::string& path) {
  std::vector<TomlTable> tables(1);
  try {
    for (const auto& [key, node] : toml::parse(read_text_file("toml", path), path)) {
      if (node.is_array_of_tables()) refuse(path, node.source(), "expected [name], got a list of tables");
      if (const toml::table* table = node.as_table())
        tables.push_back({.name = std::string(key.str()),
                          .entries = entries_of(*table, path, nullptr),
                          .line = static_cast<int>(key.source().begin.line)});
      else
        tables.front().entries.push_back(entry_of(key, node, path));
    }
  } catch (const toml::parse_error& error) {
    refuse(path, error.source(), error.description());
  }
  std::ranges::sort(tables.front().entries, {}, &TomlEntry::line);
  std::ranges::sort(tables, {}, &TomlTable::line);
  return tables;
}

TomlDocument parse_toml_document(std::string_view text, const std::string& name) {
  TomlDocument document;
  try {
    document.entries = entries_of(toml::parse(text, name), name, &document.tables);
  } catch (const toml::parse_error& error) {
    refuse(name, error.source(), error.description());
  }
  std::ranges::sort(document.tables, {}, &TomlTable::line);
  return document;
}

TomlDocument read_toml_document(const std::string& path) {
  return parse_toml_document(read_text_file("toml", path), path);
}

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  TomlDocument document = parse_toml_document(text, name);
  if (!document.tables.empty()) fail("toml", "{} line {}: {}", name, document.tables[0].line, kNoTables);
  return std::move(document.entries);
}

std::vector<TomlEntry> read_toml(const std::string& path) {
  return parse_toml(read_text_file("toml", path), path);
}

}  // namespace kiln
