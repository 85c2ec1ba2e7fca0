// Pictures and archives made for tests.
#pragma once
#include <archive.h>
#include <archive_entry.h>

#include <webp/encode.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/images/image_codecs.h"
#include "data/images/images.h"
#include "test_files.h"

namespace kiln::test {

// Smooth colours with some noise: neighbours differ.
inline Image make_picture(int64_t height, int64_t width, uint32_t seed = 0) {
  Image image{height, width, std::vector<uint8_t>(height * width * 3)};
  uint32_t state = seed * 2654435761u + 1;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < 3; ++c) {
        state = state * 1664525u + 1013904223u;
        image.rgb[(y * width + x) * 3 + c] = static_cast<uint8_t>((c == 0   ? 255 * y / height
                                                                   : c == 1 ? 255 * x / width
                                                                            : 128) /
                                                                      2 +
                                                                  (state >> 26));
      }
    }
  }
  return image;
}

// Folders are made as needed.
inline void write_file(const std::string& path, const std::string& content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  write_bytes(path, content);
}

inline std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

inline void write_picture(const std::string& path, const Image& image) {
  write_file(path, text_of(encode_png(image)));
}

inline std::vector<uint8_t> encode_jpeg(const Image& image, bool progressive = false) {
  const std::vector<std::byte> file = codecs::encode_jpeg(image, /*quality=*/90, progressive);
  const auto* const begin = reinterpret_cast<const uint8_t*>(file.data());
  return {begin, begin + file.size()};
}

inline std::vector<uint8_t> encode_webp(const Image& image) {
  uint8_t* buffer = nullptr;
  const size_t size =
      WebPEncodeLosslessRGB(image.rgb.data(), static_cast<int>(image.width), static_cast<int>(image.height),
                            static_cast<int>(image.width * 3), &buffer);
  std::vector<uint8_t> bytes(buffer, buffer + size);
  WebPFree(buffer);
  return bytes;
}

// An uncompressed tar of (name, content).
inline void write_tar(const std::string& path,
                      const std::vector<std::pair<std::string, std::string>>& members) {
  archive* writer = archive_write_new();
  archive_write_set_format_pax_restricted(writer);
  archive_write_open_filename(writer, path.c_str());
  for (const auto& [name, content] : members) {
    archive_entry* entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.c_str());
    archive_entry_set_size(entry, static_cast<int64_t>(content.size()));
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    archive_write_header(writer, entry);
    archive_write_data(writer, content.data(), content.size());
    archive_entry_free(entry);
  }
  archive_write_free(writer);
}

inline Image decode(std::span<const uint8_t> bytes, const std::string& name = "test.bin") {
  return decode_image(std::as_bytes(bytes), name);
}

}  // namespace kiln::test
