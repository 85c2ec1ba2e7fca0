// "Did you mean": the known names nearest to a mistyped one. Torch-free.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// The `count` of `names` with the fewest edits from `name`, capitals aside, nearest first; of equally near
// ones the first in order.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count);

// The number of characters to insert, remove or replace to get from one to the other, capitals aside; at most
// 1 where one contains the other.
size_t num_edits(std::string_view name, std::string_view other);

// The nearest one; "" if there are none.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

}  // namespace kiln
