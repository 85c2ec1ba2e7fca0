// The list of pictures and the lanes of latents that PixArt's tools have cached. Torch-free.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/store/data_shape.h"

namespace kiln {

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
