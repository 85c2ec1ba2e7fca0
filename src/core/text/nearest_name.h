// "Did you mean": the known names nearest to a mistyped one. Torch-free.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// Returns the `count` of `names` with the fewest edits from `name`, ignoring case, nearest first. Equally
// near ones keep their order.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count);

// Returns at most `count` of `names` that somebody who wrote `name` may have meant, nearest first; none if
// nothing is near. They are a few letters off ("max-stepz"), have its words ("steps": "max-steps") or lend
// words to it ("data-dir": "data"). Ignores case, and whether words are joined by - or _.
std::vector<std::string> similar_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count);

// Returns how many characters to insert, remove, replace or swap with their neighbour to get from one to the
// other, ignoring case. It is at most 1 if `other` contains `name`.
size_t num_edits(std::string_view name, std::string_view other);

// Returns the nearest one, or "" if there are none.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

}  // namespace kiln
