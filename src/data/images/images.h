// Decoding, cropping and writing images. Torch-free.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kiln {

struct Image {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> rgb;  // (height, width, 3)
};

inline constexpr int64_t kMaxImagePixels = int64_t{1} << 28;

// JPEG, PNG or WebP by content. Alpha is composed onto white; grey, palette, 16-bit and CMYK become 8-bit
// RGB. Orientation tags are not applied (as in DiT's and ADM's pipelines). Pixels are those of Pillow's
// convert("RGB"), but for alpha (which Pillow drops) and 16-bit grey (which Pillow clips). Throws Error
// naming `name`: not an image, truncated, corrupt, more than `max_pixels`.
Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   int64_t max_pixels = kMaxImagePixels);
Image read_image(const std::string& path);

// DiT's/ADM's center_crop_arr exactly, as PIL computes it: halve with a box filter while the short side is at
// least 2 * size, bicubic to the short side, crop the centre. Pixel-identical to Pillow.
Image center_crop(const Image& image, int64_t size);
// Pillow's filters, antialiased. PixArt's trainer takes Lanczos for buckets of 2048 pixels and more.
enum class Resampling { kBicubic, kLanczos };
// The picture resized so that it just covers (height, width), and cropped to it from the centre: how PixArt's
// trainer fills a bucket. Where that truncates the longer side below the bucket's, this does not.
Image cover_crop(const Image& image, int64_t height, int64_t width,
                 Resampling resampling = Resampling::kBicubic);
Image flip_horizontal(const Image& image);
Image resize_bicubic(const Image& image, int64_t height, int64_t width);  // Pillow's BICUBIC, antialiased
Image resize_box(const Image& image, int64_t height, int64_t width);      // Pillow's BOX, antialiased

// PNG file, atomic. Throws Error.
void write_png(const std::string& path, const Image& image);
std::vector<uint8_t> encode_png(const Image& image);
// Tiles of equal size, row-major, `columns` wide, with 2 white pixels between them and around.
Image make_grid(std::span<const Image> images, int64_t columns);

}  // namespace kiln
