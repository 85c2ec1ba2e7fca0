// Decoders and encoders of file formats. decode_image picks a decoder by content and adds the image's name to
// its errors; encode_png is in images.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "data/images/images.h"

namespace kiln::codecs {

// Says what is wrong with the bytes, without the image's name.
class DecodeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws DecodeError for an empty image or one over the limit.
void check_size(int64_t height, int64_t width, int64_t max_pixels);

// `shrink`: 1, 2, 4 or 8 divides the sides, rounding up.
Image decode_jpeg(std::span<const uint8_t> bytes, int64_t max_pixels, int shrink = 1);
Image decode_png(std::span<const uint8_t> bytes, int64_t max_pixels);
Image decode_webp(std::span<const uint8_t> bytes, int64_t max_pixels);

// Encode as other programs do by default, with chroma at half the resolution. `quality`: up to 100. Throw
// DecodeError.
std::vector<std::byte> encode_jpeg(const Image& image, int quality, bool is_progressive = false);
std::vector<std::byte> encode_webp(const Image& image, int quality);

// Composes (height, width, 4) RGBA pixels onto white.
Image compose_on_white(std::span<const uint8_t> rgba, int64_t height, int64_t width);

}  // namespace kiln::codecs
