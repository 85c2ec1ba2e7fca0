// JSON of weight files.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kiln {

// Refuses a key that is given twice, which nlohmann silently overwrites, and deep nesting. Throws Error of
// `who` naming the file.
nlohmann::json parse_strict_json(std::string_view text, std::string_view who, const std::string& name);

}  // namespace kiln
