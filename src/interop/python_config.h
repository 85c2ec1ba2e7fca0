// Configs in Python that only assign: name = value. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

// Parses assignments of None, booleans, numbers, strings, lists, tuples, dicts, dict(key=value) and names
// that were assigned before; comments are left out. Nothing is run. Throws Error naming `name` and the line:
// anything else, a value deeper than 16 levels, more than 1 MiB.
nlohmann::json parse_python_config(const std::string& text, const std::string& name);

}  // namespace kiln
