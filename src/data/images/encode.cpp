// Lossy files of pictures, to measure how fast they are read, and for tests.
// jpeglib.h needs size_t and FILE declared before it.
#include <jpeglib.h>
#include <webp/encode.h>

#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <memory>
#include <string>

#include "data/images/image_codecs.h"

namespace kiln::codecs {

namespace {

struct JpegEncoderErrors {
  jpeg_error_mgr base;
  jmp_buf jump;
};

[[noreturn]] void leave_encoder(j_common_ptr info) {
  std::longjmp(reinterpret_cast<JpegEncoderErrors*>(info->err)->jump, 1);
}

// Its frame holds only trivial locals: longjmp skips destructors.
bool compress(jpeg_compress_struct& info, const Image& image, int quality, bool is_progressive) {
  if (setjmp(reinterpret_cast<JpegEncoderErrors*>(info.err)->jump)) return false;
  info.image_width = static_cast<JDIMENSION>(image.width);
  info.image_height = static_cast<JDIMENSION>(image.height);
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, quality, TRUE);
  if (is_progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(image.rgb.data() + size_t{3} * info.image_width * info.next_scanline);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  return true;
}

}  // namespace

std::vector<std::byte> encode_jpeg(const Image& image, int quality, bool is_progressive) {
  // libjpeg would say so too, but after an error it does not give back the buffer that it has made.
  if (std::max(image.height, image.width) > JPEG_MAX_DIMENSION)
    throw DecodeError("a JPEG has at most " + std::to_string(JPEG_MAX_DIMENSION) + " pixels a side");
  jpeg_compress_struct info{};
  JpegEncoderErrors errors{};
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = leave_encoder;
  jpeg_create_compress(&info);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &buffer, &size);
  const bool is_done = compress(info, image, quality, is_progressive);
  char message[JMSG_LENGTH_MAX];
  if (!is_done) info.err->format_message(reinterpret_cast<j_common_ptr>(&info), message);
  jpeg_destroy_compress(&info);
  if (!is_done) throw DecodeError(message);
  const std::unique_ptr<unsigned char, decltype(&std::free)> owner(buffer, std::free);
  const auto* const begin = reinterpret_cast<const std::byte*>(buffer);
  return {begin, begin + size};
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
