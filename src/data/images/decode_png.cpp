#include <spng.h>

#include <memory>

#include "data/images/image_codecs.h"

namespace kiln::codecs {
namespace {

constexpr size_t kMaxChunkBytes = size_t{64} << 20;  // text and colour profiles

void check_decoding(int status) {
  if (status != SPNG_OK) throw DecodeError(spng_strerror(status));
}

}  // namespace

Image decode_png(std::span<const uint8_t> bytes, int64_t max_pixels) {
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> context(spng_ctx_new(0), spng_ctx_free);
  if (!context) throw std::bad_alloc();
  check_decoding(spng_set_crc_action(context.get(), SPNG_CRC_ERROR, SPNG_CRC_DISCARD));
  check_decoding(spng_set_chunk_limits(context.get(), kMaxChunkBytes, kMaxChunkBytes));
  check_decoding(spng_set_png_buffer(context.get(), bytes.data(), bytes.size()));
  spng_ihdr header{};
  check_decoding(spng_get_ihdr(context.get(), &header));
  check_size(header.height, header.width, max_pixels);

  spng_trns transparency{};
  const bool has_alpha = header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ||
                         header.color_type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA ||
                         spng_get_trns(context.get(), &transparency) == SPNG_OK;
  const int format = has_alpha ? SPNG_FMT_RGBA8 : SPNG_FMT_RGB8;
  std::vector<uint8_t> pixels(size_t{header.height} * header.width * (has_alpha ? 4 : 3));
  size_t expected = 0;
  check_decoding(spng_decoded_image_size(context.get(), format, &expected));
  if (expected != pixels.size()) throw DecodeError("its pixel layout is not supported");
  check_decoding(spng_decode_image(context.get(), pixels.data(), pixels.size(), format,
                                   has_alpha ? SPNG_DECODE_TRNS : 0));
  if (has_alpha) return compose_on_white(pixels, header.height, header.width);
  return {header.height, header.width, std::move(pixels)};
}

}  // namespace kiln::codecs
