#include <cstring>

#include "core/error.h"
#include "core/files/input_file.h"
#include "data/images/image_codecs.h"
#include "data/images/images.h"

namespace kiln {
namespace codecs {

void check_size(int64_t height, int64_t width, int64_t max_pixels) {
  if (height <= 0 || width <= 0) throw DecodeError("it has no pixels");
  if (height > max_pixels / width)
    throw DecodeError(fmt::format("expected at most {} pixels, got {} x {}", max_pixels, width, height));
}

Image compose_on_white(std::span<const uint8_t> rgba, int64_t height, int64_t width) {
  Image image{height, width, std::vector<uint8_t>(height * width * 3)};
  for (int64_t i = 0; i < height * width; ++i) {
    const int alpha = rgba[4 * i + 3];
    for (int c = 0; c < 3; ++c)
      image.rgb[3 * i + c] =
          static_cast<uint8_t>((rgba[4 * i + c] * alpha + 255 * (255 - alpha) + 127) / 255);
  }
  return image;
}

}  // namespace codecs

namespace {

bool starts_with(std::span<const uint8_t> bytes, std::string_view magic, size_t offset = 0) {
  return bytes.size() >= offset + magic.size() &&
         std::memcmp(bytes.data() + offset, magic.data(), magic.size()) == 0;
}

}  // namespace

Image decode_image(std::span<const std::byte> bytes, const std::string& name, int64_t max_pixels,
                   int jpeg_shrink) {
  const std::span<const uint8_t> data(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  try {
    if (starts_with(data, "\xff\xd8\xff")) return codecs::decode_jpeg(data, max_pixels, jpeg_shrink);
    if (starts_with(data, "\x89PNG\r\n\x1a\n")) return codecs::decode_png(data, max_pixels);
    if (starts_with(data, "RIFF") && starts_with(data, "WEBP", 8))
      return codecs::decode_webp(data, max_pixels);
  } catch (const codecs::DecodeError& error) {
    fail("image", "cannot decode {}: {}", name, error.what());
  }
  if (data.empty()) fail("image", "cannot decode {}: the file is empty", name);
  fail("image", "cannot decode {}: expected a JPEG, PNG or WebP, got something else", name);
}

Image read_image(const std::string& path) { return decode_image(read_file("image", path), path); }

}  // namespace kiln
