// YAML configs that other programs write, as JSON. Torch-free.
#pragma once
#include <string>
#include <string_view>

#include "core/json.h"

namespace kiln {

// Parses mappings with plain keys, lists and scalars. A plain scalar is null, a boolean or a number where it
// is one in JSON's or YAML's words, else a string. No-break spaces, which text copied from a web page has as
// indentation, are spaces. Throws Error of `who` naming `name` and the line: not YAML, no mapping of keys, a
// key given twice, more than 1 MiB, 16 levels or 20,000 values (aliases counted where they stand).
nlohmann::json parse_yaml(std::string_view who, std::string text, const std::string& name);
nlohmann::json read_yaml(std::string_view who, const std::string& path);

}  // namespace kiln
