// Parses the JSON of weight files.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kiln {

// Refuses deep nesting and keys that are given twice, which nlohmann would silently overwrite. Throws Error
// that begins with `who` and names the file.
nlohmann::json parse_strict_json(std::string_view text, std::string_view who, const std::string& name);

}  // namespace kiln
