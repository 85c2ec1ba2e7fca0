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

// JPEG, PNG or WebP by content. Alpha is composed onto white; grey, palette, 16-bit and CMYK become 8-bit RGB.
// Throws Error naming `name`. Sizes over 2^28 pixels are refused.
Image decode_image(std::span<const std::byte> bytes, const std::string& name);
Image read_image(const std::string& path);

// DiT's/ADM's center_crop_arr exactly, as PIL computes it: halve with a box filter while the short side is at least
// 2 * size, bicubic to the short side, crop the centre. Pixel-identical to Pillow.
Image center_crop(const Image& image, int64_t size);
Image flip_horizontal(const Image& image);
Image resize_bicubic(const Image& image, int64_t height, int64_t width);  // Pillow's BICUBIC, antialiased

// PNG file, atomic. Throws Error.
void write_png(const std::string& path, const Image& image);
std::vector<uint8_t> encode_png(const Image& image);
// Tiles of equal size, row-major, `columns` wide, 2-pixel white gaps.
Image make_grid(std::span<const Image> images, int64_t columns);

}  // namespace kiln
