#include "extract/image_values.h"

#include <array>

namespace kiln {
namespace {

std::array<float, 256> make_values() {
  std::array<float, 256> values;
  for (int level = 0; level < 256; ++level)
    values[level] = (static_cast<float>(level) / 255.0f - 0.5f) / 0.5f;
  return values;
}

}  // namespace

void write_image_values(const Image& image, bool mirrored, std::span<float> out) {
  static const std::array<float, 256> kValues = make_values();
  const int64_t plane = image.height * image.width;
  const uint8_t* pixel = image.rgb.data();
  for (int64_t y = 0; y < image.height; ++y) {
    for (int64_t x = 0; x < image.width; ++x, pixel += 3) {
      const int64_t at = y * image.width + (mirrored ? image.width - 1 - x : x);
      for (int64_t c = 0; c < 3; ++c) out[c * plane + at] = kValues[pixel[c]];
    }
  }
}

}  // namespace kiln
