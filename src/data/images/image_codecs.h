// One decoder per file format. decode_image picks one by content and adds the image's name to its errors.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>

#include "data/images/images.h"

namespace kiln::codecs {

// Says what is wrong with the bytes, without the image's name.
class DecodeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws DecodeError for an empty image or one over the limit.
void check_size(int64_t height, int64_t width, int64_t max_pixels);

Image decode_jpeg(std::span<const uint8_t> bytes, int64_t max_pixels);
Image decode_png(std::span<const uint8_t> bytes, int64_t max_pixels);
Image decode_webp(std::span<const uint8_t> bytes, int64_t max_pixels);

// Composes (height, width, 4) RGBA pixels onto white.
Image compose_on_white(std::span<const uint8_t> rgba, int64_t height, int64_t width);

}  // namespace kiln::codecs
