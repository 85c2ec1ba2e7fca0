#include "data/images/images.h"

#include <spng.h>

#include <memory>
#include <string_view>

#include "core/text/utf8.h"

namespace kiln {
namespace {

constexpr size_t kMaxTextBytes = size_t{16} << 20;

std::string from_latin1(std::string_view text) {
  std::string utf8;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      utf8 += c;
    } else {
      utf8 += static_cast<char>(0xC0 | byte >> 6);
      utf8 += static_cast<char>(0x80 | (byte & 0x3F));
    }
  }
  return utf8;
}

}  // namespace

PngTexts png_texts(std::span<const std::byte> bytes) {
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> context(spng_ctx_new(0), spng_ctx_free);
  if (!context) throw std::bad_alloc();
  uint32_t count = 0;
  // This also reads the chunks behind the pixels, without decoding the pixels.
  if (spng_set_crc_action(context.get(), SPNG_CRC_ERROR, SPNG_CRC_DISCARD) != SPNG_OK ||
      spng_set_chunk_limits(context.get(), kMaxTextBytes, kMaxTextBytes) != SPNG_OK ||
      spng_set_png_buffer(context.get(), bytes.data(), bytes.size()) != SPNG_OK ||
      spng_decode_chunks(context.get()) != SPNG_OK ||
      spng_get_text(context.get(), nullptr, &count) != SPNG_OK)
    return {};
  std::vector<spng_text> chunks(count);
  if (spng_get_text(context.get(), chunks.data(), &count) != SPNG_OK) return {};
  PngTexts texts;
  for (const spng_text& chunk : chunks) {
    const std::string_view text(chunk.text, chunk.length);
    texts.emplace_back(chunk.keyword, is_utf8(text) ? std::string(text) : from_latin1(text));
  }
  return texts;
}

}  // namespace kiln
