// The YAML that accelerate writes: mappings by indentation, lists, plain and quoted scalars. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

// Throws Error naming the line for what is no such YAML.
nlohmann::json parse_accelerate_yaml(const std::string& text, const std::string& name);

}  // namespace kiln
