#include <webp/decode.h>

#include "data/images/image_codecs.h"

namespace kiln::codecs {

Image decode_webp(std::span<const uint8_t> bytes, int64_t max_pixels) {
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes.data(), bytes.size(), &features) != VP8_STATUS_OK)
    throw DecodeError("its WebP header is corrupt or truncated");
  if (features.has_animation) throw DecodeError("expected a still picture, got an animated WebP");
  check_size(features.height, features.width, max_pixels);
  const int64_t height = features.height, width = features.width;
  const int channels = features.has_alpha ? 4 : 3;
  std::vector<uint8_t> pixels(height * width * channels);
  const int stride = static_cast<int>(width) * channels;
  const auto* decoded =
      features.has_alpha
          ? WebPDecodeRGBAInto(bytes.data(), bytes.size(), pixels.data(), pixels.size(), stride)
          : WebPDecodeRGBInto(bytes.data(), bytes.size(), pixels.data(), pixels.size(), stride);
  if (!decoded) throw DecodeError("its WebP data is corrupt or truncated");
  if (features.has_alpha) return compose_on_white(pixels, height, width);
  return {height, width, std::move(pixels)};
}

}  // namespace kiln::codecs
