// The caches of other trainers: folders of .npy files, and the list of pictures and the lanes of latents that
// PixArt's tools have cached. Torch-free.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/images/npz.h"
#include "data/store/data_shape.h"

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

// The pictures of a data_info.json, found by the file that holds their latents.
class PixartList {
 public:
  struct Picture {
    std::string path;
    std::array<int64_t, 2> image_hw{};  // height and width
    std::string prompt;                 // "" if there is none
  };
  // Reads a JSON list of objects with path, height, width and optionally prompt. Throws Error naming a wrong
  // entry.
  explicit PixartList(const std::string& path);

  // Returns the picture of a file of latents. `file` is relative to their folder: for a/b/c.png it is c.npy
  // (tools/extract_features.py), a/b_c.npy (what the trainers read) or a/b/c.npy. Throws Error if it belongs
  // to no picture or may belong to several.
  const Picture& of_latents(const std::string& file) const;

 private:
  std::string path_;
  std::vector<Picture> pictures_;
  std::unordered_map<std::string, std::vector<size_t>> by_file_;
};

// Returns the lane of latents (height, width) of one of PixArt's autoencoders, which divide sides by eight.
// Its aspect ratio is the key of this size in PixArt's table of `image_size`, else the quotient to two
// decimals.
Lane pixart_lane(int64_t height, int64_t width, int64_t image_size);

}  // namespace kiln
