// Folders of .npy files, as the caches of other trainers are. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/images/npz.h"

namespace kiln {

// Paths of all .npy files below `folder`, relative to it; numbers in their order, then names. Others are
// counted. Throws Error: no folder.
std::vector<std::string> list_npy(const std::string& folder, int64_t& num_other_files);
// The one folder in `parent` whose name ends with `suffix`, "" if there is none. Throws Error: there are
// several.
std::string find_folder(const std::string& parent, std::string_view suffix);

// Type and shape alone. Throws Error as read_npy().
NpyHeader read_npy_header(const std::string& path);
// f16, f32 or f64 as f32. Throws Error: other types.
std::vector<float> float_values(const NpyArray& array, const std::string& path);
// The one integer of a file. Throws Error: other things, a negative number.
int64_t read_label(const std::string& path);

}  // namespace kiln
