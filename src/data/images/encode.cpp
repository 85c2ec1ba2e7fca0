// Lossy files of pictures, to measure how fast they are read.
#include <cstdio>
// jpeglib.h needs size_t and FILE declared before it.
#include <jpeglib.h>
#include <webp/encode.h>

#include <cstdlib>
#include <memory>

#include "data/images/image_codecs.h"

namespace kiln::codecs {

std::vector<std::byte> encode_jpeg(const Image& image, int quality) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);  // the only errors of these settings are those of memory, which end it
  jpeg_create_compress(&info);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &buffer, &size);
  info.image_width = static_cast<JDIMENSION>(image.width);
  info.image_height = static_cast<JDIMENSION>(image.height);
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, quality, TRUE);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(image.rgb.data() + size_t{3} * info.image_width * info.next_scanline);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  const auto* const begin = reinterpret_cast<const std::byte*>(buffer);
  std::vector<std::byte> bytes(begin, begin + size);
  jpeg_destroy_compress(&info);
  std::free(buffer);
  return bytes;
}

std::vector<std::byte> encode_webp(const Image& image, int quality) {
  uint8_t* buffer = nullptr;
  const size_t size =
      WebPEncodeRGB(image.rgb.data(), static_cast<int>(image.width), static_cast<int>(image.height),
                    static_cast<int>(3 * image.width), static_cast<float>(quality), &buffer);
  const std::unique_ptr<uint8_t, decltype(&WebPFree)> owner(buffer, WebPFree);
  if (size == 0) throw DecodeError("it cannot be encoded as WebP");
  const auto* const begin = reinterpret_cast<const std::byte*>(buffer);
  return {begin, begin + size};
}

}  // namespace kiln::codecs
