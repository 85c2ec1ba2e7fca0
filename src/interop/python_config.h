// Configs in Python that only assign: name = value. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

// Parses assignments of None, booleans, numbers, strings, lists, tuples, dicts, dict(key=value) and names
// that were assigned before; comments are left out. Nothing is run. Throws Error naming `name` and the line:
// anything else, a value deeper than 16 levels, more than 1 MiB.
nlohmann::json parse_python_config(const std::string& text, const std::string& name);

// Returns what a config is on top of those that its _base_ names, as mmcv does: a dict is merged into the
// base's dict of the same key, unless it has the key _delete_.
nlohmann::json inherit_python_config(nlohmann::json base, const nlohmann::json& config);

}  // namespace kiln
