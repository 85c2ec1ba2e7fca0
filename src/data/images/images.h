// Decodes, resizes, crops and writes images. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kiln {

struct Image {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> rgb;  // (height, width, 3)
};

inline constexpr int64_t kMaxImagePixels = int64_t{1} << 28;

// Decodes a JPEG, PNG or WebP, which is recognised by its content. Alpha is composed onto white; grey,
// palette, 16-bit and CMYK become 8-bit RGB. Orientation tags are not applied (as in DiT's and ADM's
// pipelines). The pixels are those of Pillow's convert("RGB"), except for alpha (which Pillow drops) and
// 16-bit grey (which Pillow clips). Throws Error naming `name`: not an image, truncated, corrupt, more than
// `max_pixels`. `jpeg_shrink`: 1, 2, 4 or 8 divides the sides of a JPEG, rounding up, which is faster; the
// same files are refused.
Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   int64_t max_pixels = kMaxImagePixels, int jpeg_shrink = 1);
Image read_image(const std::string& path);

// Crops as center_crop_arr of DiT and ADM does with PIL: halves with a box filter while the short side is at
// least 2 * size, resizes bicubically until the short side is `size`, and crops the centre. Pixel-identical
// to Pillow.
Image center_crop(const Image& image, int64_t size);
// Pillow's filters, antialiased. PixArt's trainer takes Lanczos for buckets of 2048 pixels and more.
enum class Resampling { kBicubic, kLanczos };
// Resizes the picture so that it just covers (height, width) and crops it from the centre, as PixArt's
// trainer fills a bucket. That trainer may truncate the longer side below the bucket's; this function does
// not.
Image cover_crop(const Image& image, int64_t height, int64_t width,
                 Resampling resampling = Resampling::kBicubic);
Image resize_bicubic(const Image& image, int64_t height, int64_t width);  // Pillow's BICUBIC, antialiased

// What a PNG file says of itself: keywords (ASCII, up to 79 bytes) and texts (UTF-8). png_texts() reads them.
using PngTexts = std::vector<std::pair<std::string, std::string>>;
// Writes a PNG file atomically. Throws Error.
void write_png(const std::string& path, const Image& image, const PngTexts& texts = {});
std::vector<uint8_t> encode_png(const Image& image, const PngTexts& texts = {});
// Arranges images of equal size as tiles, row-major, in `columns` columns, with 2 white pixels between and
// around them.
Image make_grid(std::span<const Image> images, int64_t columns);

// Returns the keyword and text of every tEXt, zTXt and iTXt chunk, in UTF-8 and in the order of the file;
// nothing if the file is no PNG or broken. By the standard tEXt is Latin-1, but some programs write UTF-8:
// text that is not UTF-8 is taken as Latin-1.
PngTexts png_texts(std::span<const std::byte> bytes);

}  // namespace kiln
