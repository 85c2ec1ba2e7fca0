// The header of a picture's file: its size and its orientation. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/choices.h"
#include "core/error.h"
#include "data/images/images.h"

namespace kiln {

// A picture whose file was read and cannot be used: it is no image, cut off, corrupt or too small.
class BrokenPicture : public Error {
 public:
  using Error::Error;
};

enum class PictureFormat { kJpeg, kPng, kWebp };
template <>
struct Choices<PictureFormat> {
  static constexpr std::pair<PictureFormat, const char*> kAll[] = {
      {PictureFormat::kJpeg, "JPEG"}, {PictureFormat::kPng, "PNG"}, {PictureFormat::kWebp, "WebP"}};
};

struct ImageHeader {
  int64_t height = 0, width = 0;  // of the pixels as stored
  // EXIF's orientation: 1 is upright, 2 to 8 are the other ways of turning and mirroring. 1 if none is given.
  int orientation = 1;
  PictureFormat format = PictureFormat::kJpeg;

  // The size as a viewer shows it. Orientations from 5 on lay the picture on its side.
  int64_t upright_height() const { return orientation < 5 ? height : width; }
  int64_t upright_width() const { return orientation < 5 ? width : height; }
};

// A file that is read in pieces. `read` returns the bytes [offset, offset + count), which lie inside the
// file.
struct PictureBytes {
  int64_t size = 0;
  std::function<std::vector<std::byte>(int64_t offset, int64_t count)> read;
};
PictureBytes bytes_in_memory(std::span<const std::byte> bytes);  // `bytes` must outlive the result

// Reads the header of a JPEG, PNG or WebP without its pixels. The orientation comes from JPEG's Exif segment,
// PNG's eXIf chunk or WebP's EXIF chunk; a damaged one counts as none. Throws BrokenPicture naming
// `name`: not an image, or cut off in its header; and what `file` throws.
ImageHeader read_image_header(const PictureBytes& file, const std::string& name);

// Turns and mirrors the picture as `orientation` asks, like Pillow's exif_transpose.
Image upright(Image image, int orientation);

}  // namespace kiln
