// The size of a model that only names its family.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "models/model_options.h"

namespace kiln {

// One line for who gives --model a family's own name and no width, depth or config: which size that is, and
// the sizes there are. Empty otherwise. `config`: the full one.
std::string unnamed_size(const ModelOptions& options, const nlohmann::json& config);

}  // namespace kiln
