// The precompiled header of torch-free code: fmt and JSON.
#pragma once
#include <fmt/format.h>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"

extern template class nlohmann::basic_json<>;  // instantiations.cpp has them
extern template class nlohmann::detail::serializer<nlohmann::json>;
