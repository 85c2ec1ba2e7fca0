// Which classes to draw, given as numbers or names.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// `selection`: class numbers, names (capitals do not matter), or "all"; empty = all. Names win over numbers.
// Throws Error: a number out of range, an unknown name (with the nearest ones), names for a model that has
// none.
std::vector<int64_t> select_classes(const std::vector<std::string>& selection,
                                    const std::vector<std::string>& class_names, int64_t num_classes);

}  // namespace kiln
