// What a picture's file says before its pixels: its size, and which way up it is. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "data/images/images.h"

namespace kiln {

struct ImageHeader {
  int64_t height = 0, width = 0;  // of the pixels as stored
  // EXIF's: 1 is upright, 2 to 8 are the other ways of turning and mirroring. 1 where none is given.
  int orientation = 1;

  // As seen: orientations from 5 on lay the picture on its side.
  int64_t upright_height() const { return orientation < 5 ? height : width; }
  int64_t upright_width() const { return orientation < 5 ? width : height; }
};

// A file that is read in pieces: `read` gives the bytes [offset, offset + count), which lie inside.
struct PictureBytes {
  int64_t size = 0;
  std::function<std::vector<std::byte>(int64_t offset, int64_t count)> read;
};
PictureBytes bytes_in_memory(std::span<const std::byte> bytes);  // which must outlive it

// Reads the header of a JPEG, PNG or WebP, and no pixels. The orientation is that of JPEG's Exif segment,
// PNG's eXIf and WebP's EXIF chunk; a damaged one is none. Throws Error naming `name`: not an image, or cut
// off in its header.
ImageHeader read_image_header(const PictureBytes& file, const std::string& name);

// The picture turned and mirrored as `orientation` asks for, as Pillow's exif_transpose does it.
Image upright(Image image, int orientation);

}  // namespace kiln
