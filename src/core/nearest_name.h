// "Did you mean": the known name nearest to a mistyped one. Torch-free.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// The one of `names` with the least edit distance to `name`, the first in order of several; "" if there are
// none.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

}  // namespace kiln
