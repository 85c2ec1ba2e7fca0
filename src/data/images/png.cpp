// Writes PNG files, and reads the texts that they carry.
#include <spng.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/text/utf8.h"
#include "data/images/images.h"

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

void check_encoding(int status) {
  if (status != SPNG_OK) fail("png", "cannot encode a PNG: {}", spng_strerror(status));
}

// Sets the texts as uncompressed iTXt chunks, which are UTF-8 and stand before the pixels. The library
// refuses empty ones, which are left out.
void set_texts(spng_ctx* context, const PngTexts& texts) {
  static char none[] = "";
  std::vector<spng_text> chunks;
  for (const auto& [keyword, text] : texts) {
    if (text.empty()) continue;
    spng_text& chunk = chunks.emplace_back();
    if (keyword.size() >= sizeof chunk.keyword) fail("png", "the keyword {} is too long", keyword);
    std::copy(keyword.begin(), keyword.end(), chunk.keyword);
    chunk.type = SPNG_ITXT;
    chunk.text = const_cast<char*>(text.c_str());  // only read
    chunk.length = text.size();
    chunk.language_tag = chunk.translated_keyword = none;
  }
  if (!chunks.empty())
    check_encoding(spng_set_text(context, chunks.data(), static_cast<uint32_t>(chunks.size())));
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

std::vector<uint8_t> encode_png(const Image& image, const PngTexts& texts) {
  if (image.height < 1 || image.width < 1 ||
      image.rgb.size() != static_cast<size_t>(image.height * image.width * 3))
    fail("png", "expected {} x {} RGB pixels, got {} bytes", image.width, image.height, image.rgb.size());
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> context(spng_ctx_new(SPNG_CTX_ENCODER),
                                                                    spng_ctx_free);
  if (!context) throw std::bad_alloc();
  check_encoding(spng_set_option(context.get(), SPNG_ENCODE_TO_BUFFER, 1));
  spng_ihdr header{};
  header.width = static_cast<uint32_t>(image.width);
  header.height = static_cast<uint32_t>(image.height);
  header.bit_depth = 8;
  header.color_type = SPNG_COLOR_TYPE_TRUECOLOR;
  check_encoding(spng_set_ihdr(context.get(), &header));
  set_texts(context.get(), texts);
  check_encoding(spng_encode_image(context.get(), image.rgb.data(), image.rgb.size(), SPNG_FMT_PNG,
                                   SPNG_ENCODE_FINALIZE));
  size_t size = 0;
  int status = 0;
  const std::unique_ptr<void, decltype(&std::free)> buffer(spng_get_png_buffer(context.get(), &size, &status),
                                                           std::free);
  check_encoding(status);
  const auto* bytes = static_cast<const uint8_t*>(buffer.get());
  return {bytes, bytes + size};
}

void write_png(const std::string& path, const Image& image, const PngTexts& texts) {
  const std::vector<uint8_t> png = encode_png(image, texts);
  AtomicFile file("png", path);
  file.write(std::as_bytes(std::span(png)));
  file.commit();
}

Image make_grid(std::span<const Image> images, int64_t columns) {
  constexpr int64_t kGap = 2;
  if (images.empty() || columns < 1)
    fail("grid", "expected images and columns, got {} and {}", images.size(), columns);
  const int64_t count = static_cast<int64_t>(images.size());
  const int64_t tile_height = images[0].height, tile_width = images[0].width;
  columns = std::min(columns, count);
  const int64_t rows = (count + columns - 1) / columns;
  Image grid{rows * (tile_height + kGap) + kGap, columns * (tile_width + kGap) + kGap, {}};
  grid.rgb.assign(grid.height * grid.width * 3, 255);
  for (int64_t i = 0; i < count; ++i) {
    if (images[i].height != tile_height || images[i].width != tile_width)
      fail("grid", "expected tiles of {} x {}, got {} x {}", tile_width, tile_height, images[i].width,
           images[i].height);
    const int64_t top = i / columns * (tile_height + kGap) + kGap,
                  left = i % columns * (tile_width + kGap) + kGap;
    for (int64_t y = 0; y < tile_height; ++y)
      std::copy_n(images[i].rgb.data() + y * tile_width * 3, tile_width * 3,
                  grid.rgb.data() + ((top + y) * grid.width + left) * 3);
  }
  return grid;
}

}  // namespace kiln
