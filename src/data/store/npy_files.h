// Folders of .npy files, which are the caches of other trainers. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/images/npz.h"

namespace kiln {

// Returns the paths of all .npy files below `folder`, relative to it: names that are numbers in their order,
// then the other names. Adds the number of other files to `num_other_files`. Throws Error: no folder.
std::vector<std::string> list_npy(const std::string& folder, int64_t& num_other_files);
// Returns the one folder in `parent` whose name ends with `suffix`, "" if there is none. Throws Error: there
// are several.
std::string find_folder(const std::string& parent, std::string_view suffix);

// Reads only the header of a file. Throws Error as read_npy().
NpyHeader read_npy_header(const std::string& path);
// Converts f16, f32 or f64 to f32. Throws Error for other types.
std::vector<float> float_values(const NpyArray& array, const std::string& path);
// Reads the one integer of a file. Throws Error for anything else, or a negative number.
int64_t read_label(const std::string& path);

}  // namespace kiln
