// JPEG through libjpeg-turbo with the settings that Pillow uses: accurate integer DCT, fancy upsampling.
#include <cstdio>
// jpeglib.h needs size_t and FILE declared before it.
#include <jerror.h>
#include <jpeglib.h>

#include <csetjmp>
#include <cstring>

#include "data/images/image_codecs.h"

namespace kiln::codecs {
namespace {

// Hostile progressive files repeat scans without end; honest ones have about ten.
constexpr int kMaxScans = 500;

struct ErrorManager {
  jpeg_error_mgr base;
  jmp_buf jump;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void leave(j_common_ptr info, const char* message) {
  auto* errors = reinterpret_cast<ErrorManager*>(info->err);
  if (message)
    std::snprintf(errors->message, sizeof errors->message, "%s", message);
  else
    info->err->format_message(info, errors->message);
  std::longjmp(errors->jump, 1);
}

void on_error(j_common_ptr info) { leave(info, nullptr); }
void on_message(j_common_ptr, int) {}  // warnings: Pillow ignores them too (stray bytes between markers)

// All bytes are in memory: asking for more means that the file ends early.
boolean on_end_of_data(j_decompress_ptr info) {
  leave(reinterpret_cast<j_common_ptr>(info), "the file is truncated");
}
void skip_bytes(j_decompress_ptr info, long count) {
  if (count <= 0) return;
  if (static_cast<size_t>(count) > info->src->bytes_in_buffer) on_end_of_data(info);
  info->src->next_input_byte += count;
  info->src->bytes_in_buffer -= count;
}
void no_source_action(j_decompress_ptr) {}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans)
    leave(info, "it has too many scans");
}

// Pillow's CMYK to RGB, on values that Adobe's convention stores inverted.
void cmyk_row_to_rgb(const uint8_t* cmyk, uint8_t* rgb, int64_t width) {
  for (int64_t x = 0; x < width; ++x) {
    const int paper = cmyk[4 * x + 3];  // 255 - K
    for (int c = 0; c < 3; ++c) {
      const int product = (255 - cmyk[4 * x + c]) * paper + 128;
      const int ink = ((product >> 8) + product) >> 8;  // rounded division by 255
      rgb[3 * x + c] = static_cast<uint8_t>(paper > ink ? paper - ink : 0);
    }
  }
}

// Frames that call setjmp hold only trivial locals: longjmp skips destructors.
class Decoder {
 public:
  explicit Decoder(std::span<const uint8_t> bytes) {
    std::memset(&info_, 0, sizeof info_);
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = on_error;
    errors_.base.emit_message = on_message;
    source_.init_source = no_source_action;
    source_.fill_input_buffer = on_end_of_data;
    source_.skip_input_data = skip_bytes;
    source_.resync_to_restart = jpeg_resync_to_restart;
    source_.term_source = no_source_action;
    source_.next_input_byte = bytes.data();
    source_.bytes_in_buffer = bytes.size();
    progress_.progress_monitor = on_progress;
  }
  ~Decoder() { jpeg_destroy_decompress(&info_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // `shrink`: 1, 2, 4 or 8, by which the decoder divides the sides.
  bool read_header(int shrink) {
    if (setjmp(errors_.jump)) return false;
    jpeg_create_decompress(&info_);
    info_.src = &source_;
    info_.progress = &progress_;
    jpeg_read_header(&info_, TRUE);
    switch (info_.jpeg_color_space) {
      case JCS_GRAYSCALE:
      case JCS_RGB:
      case JCS_YCbCr:
        info_.out_color_space = JCS_RGB;
        break;
      case JCS_CMYK:
      case JCS_YCCK:
        info_.out_color_space = JCS_CMYK;
        break;
      default:
        leave(reinterpret_cast<j_common_ptr>(&info_), "its colour space is unknown");
    }
    info_.scale_denom = static_cast<unsigned>(shrink);
    jpeg_calc_output_dimensions(&info_);
    return true;
  }

  // `row`: scratch of width() * 4 bytes for CMYK.
  bool read_pixels(uint8_t* rgb, uint8_t* row) {
    if (setjmp(errors_.jump)) return false;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      uint8_t* out = rgb + size_t{3} * info_.output_width * info_.output_scanline;
      uint8_t* target = is_cmyk() ? row : out;
      jpeg_read_scanlines(&info_, &target, 1);
      if (is_cmyk()) cmyk_row_to_rgb(row, out, info_.output_width);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }

  int64_t height() const { return info_.output_height; }
  int64_t width() const { return info_.output_width; }
  void check(int64_t max_pixels) const { check_size(info_.image_height, info_.image_width, max_pixels); }
  const char* message() const { return errors_.message; }

 private:
  bool is_cmyk() const { return info_.out_color_space == JCS_CMYK; }

  jpeg_decompress_struct info_;
  ErrorManager errors_{};
  jpeg_source_mgr source_{};
  jpeg_progress_mgr progress_{};
};

}  // namespace

Image decode_jpeg(std::span<const uint8_t> bytes, int64_t max_pixels, int shrink) {
  Decoder decoder(bytes);
  if (!decoder.read_header(shrink)) throw DecodeError(decoder.message());
  decoder.check(max_pixels);
  Image image{decoder.height(), decoder.width(),
              std::vector<uint8_t>(decoder.height() * decoder.width() * 3)};
  std::vector<uint8_t> row(decoder.width() * 4);
  if (!decoder.read_pixels(image.rgb.data(), row.data())) throw DecodeError(decoder.message());
  return image;
}

}  // namespace kiln::codecs
