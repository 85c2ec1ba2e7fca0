#include "data/images/image_header.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "data/images/image_codecs.h"

namespace kiln {
namespace {

using codecs::DecodeError;

constexpr int kOrientationTag = 0x0112;
constexpr int64_t kMostExifBytes = 1 << 20;

// Reads numbers at offsets of a file. Throws DecodeError behind its end.
class Reader {
 public:
  explicit Reader(const PictureBytes& file) : file_(file) {}

  int64_t size() const { return file_.size; }
  std::span<const uint8_t> bytes(int64_t offset, int64_t count) {
    if (offset < 0 || count > file_.size - offset) throw DecodeError("the file is truncated");
    if (offset < first_ || offset + count > first_ + static_cast<int64_t>(block_.size())) {
      // Most headers lie in the first block. Behind it the reader jumps from chunk to chunk.
      constexpr int64_t kFirstBlock = 4096, kBlock = 64;
      first_ = offset;
      block_ = file_.read(offset,
                          std::min(std::max(count, offset == 0 ? kFirstBlock : kBlock), file_.size - offset));
    }
    return {reinterpret_cast<const uint8_t*>(block_.data()) + (offset - first_), static_cast<size_t>(count)};
  }
  bool has(int64_t offset, std::string_view text) {
    const auto length = static_cast<int64_t>(text.size());
    return offset + length <= size() &&
           std::memcmp(bytes(offset, length).data(), text.data(), text.size()) == 0;
  }
  int64_t big_endian(int64_t offset, int num_bytes) {
    int64_t value = 0;
    for (const uint8_t byte : bytes(offset, num_bytes)) value = value << 8 | byte;
    return value;
  }
  int64_t little_endian(int64_t offset, int num_bytes) {
    int64_t value = 0;
    for (int i = 0; const uint8_t byte : bytes(offset, num_bytes)) value |= int64_t{byte} << 8 * i++;
    return value;
  }

 private:
  const PictureBytes& file_;
  int64_t first_ = 0;
  std::vector<std::byte> block_;
};

// Returns the orientation from a TIFF header with its directory, which is what EXIF consists of in every file
// format. Returns 1 if there is none.
int orientation_of(std::span<const uint8_t> exif) {
  const bool is_little = exif.size() > 8 && exif[0] == 'I';
  const auto number = [&](size_t offset, size_t num_bytes) -> size_t {
    if (offset + num_bytes > exif.size()) return 0;
    size_t value = 0;
    for (size_t i = 0; i < num_bytes; ++i)
      value = value << 8 | exif[offset + (is_little ? num_bytes - 1 - i : i)];
    return value;
  };
  const auto begins_with = [&](std::string_view magic) {
    return exif.size() > 8 && std::memcmp(exif.data(), magic.data(), magic.size()) == 0;
  };
  if (!begins_with({"II*\0", 4}) && !begins_with({"MM\0*", 4})) return 1;
  const size_t directory = number(4, 4), num_entries = number(directory, 2);
  constexpr size_t kEntryBytes = 12, kShort = 3;
  for (size_t i = 0; i < num_entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (number(entry, 2) != kOrientationTag || number(entry + 2, 2) != kShort) continue;
    const size_t orientation = number(entry + 8, 2);
    return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
  }
  return 1;
}

int exif_at(Reader& file, int64_t offset, int64_t count) {
  constexpr std::string_view kPrefix{"Exif\0\0", 6};  // JPEG's segment has it, some programs' chunks do too
  if (count > 6 && file.has(offset, kPrefix)) {
    offset += 6;
    count -= 6;
  }
  if (count < 1 || count > kMostExifBytes) return 1;
  return orientation_of(file.bytes(offset, count));
}

ImageHeader read_jpeg(Reader& file) {
  ImageHeader header;
  bool has_exif = false;
  for (int64_t at = 2;;) {
    while (file.big_endian(at, 1) != 0xff) ++at;  // stray bytes, as decoders skip them
    while (file.big_endian(at, 1) == 0xff) ++at;
    const int64_t marker = file.big_endian(at++, 1);
    const bool stands_alone = marker == 0x00 || marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8);
    if (stands_alone) continue;
    if (marker == 0xd9 || marker == 0xda) throw DecodeError("its size is not given before its pixels");
    const int64_t length = file.big_endian(at, 2);
    if (length < 2) throw DecodeError("a segment has no length");
    if (marker == 0xe1 && !has_exif && length > 8 && file.has(at + 2, {"Exif\0\0", 6})) {
      has_exif = true;
      if (at + length <= file.size()) header.orientation = exif_at(file, at + 2, length - 2);
    }
    const bool is_frame =
        marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
    if (is_frame) {
      header.height = file.big_endian(at + 3, 2);
      header.width = file.big_endian(at + 5, 2);
      return header;
    }
    at += length;
  }
}

ImageHeader read_png(Reader& file) {
  file.bytes(0, 33);  // signature, header, its checksum
  if (!file.has(12, "IHDR")) throw DecodeError("it does not begin with its size");
  ImageHeader header{file.big_endian(20, 4), file.big_endian(16, 4)};
  // The chunk may stand behind the pixels: ImageMagick writes it there.
  constexpr int64_t kChunkFrame = 12;  // length, name, checksum
  for (int64_t at = 8; at + kChunkFrame <= file.size();) {
    const int64_t length = file.big_endian(at, 4);
    if (file.has(at + 4, "eXIf") && at + kChunkFrame + length <= file.size()) {
      header.orientation = exif_at(file, at + 8, length);
      break;
    }
    at += kChunkFrame + length;
  }
  return header;
}

ImageHeader read_webp(Reader& file) {
  ImageHeader header;
  if (file.has(12, "VP8 ")) {
    if (!file.has(23, "\x9d\x01\x2a")) throw DecodeError("its WebP header is corrupt or truncated");
    header = {file.little_endian(28, 2) & 0x3fff, file.little_endian(26, 2) & 0x3fff};
  } else if (file.has(12, "VP8L")) {
    const int64_t bits = file.little_endian(21, 4);
    header = {(bits >> 14 & 0x3fff) + 1, (bits & 0x3fff) + 1};
  } else if (file.has(12, "VP8X")) {
    header = {file.little_endian(27, 3) + 1, file.little_endian(24, 3) + 1};
    for (int64_t at = 12; at + 8 <= file.size();) {
      const int64_t length = file.little_endian(at + 4, 4);
      if (file.has(at, "EXIF") && at + 8 + length <= file.size()) {
        header.orientation = exif_at(file, at + 8, length);
        break;
      }
      at += 8 + length + length % 2;
    }
  } else {
    throw DecodeError("its WebP header is corrupt or truncated");
  }
  return header;
}

}  // namespace

PictureBytes bytes_in_memory(std::span<const std::byte> bytes) {
  return {.size = static_cast<int64_t>(bytes.size()), .read = [bytes](int64_t offset, int64_t count) {
            const auto part = bytes.subspan(static_cast<size_t>(offset), static_cast<size_t>(count));
            return std::vector<std::byte>(part.begin(), part.end());
          }};
}

ImageHeader read_image_header(const PictureBytes& file, const std::string& name) {
  Reader reader(file);
  try {
    ImageHeader header;
    if (reader.has(0, "\xff\xd8\xff")) {
      header = read_jpeg(reader);
    } else if (reader.has(0, "\x89PNG\r\n\x1a\n")) {
      header = read_png(reader);
      header.format = PictureFormat::kPng;
    } else if (reader.has(0, "RIFF") && reader.has(8, "WEBP")) {
      header = read_webp(reader);
      header.format = PictureFormat::kWebp;
    } else {
      throw DecodeError(file.size == 0 ? "the file is empty"
                                       : "expected a JPEG, PNG or WebP, got something else");
    }
    codecs::check_size(header.height, header.width, kMaxImagePixels);
    return header;
  } catch (const DecodeError& error) {
    throw BrokenPicture(fmt::format("cannot decode {}: {}", name, error.what()));
  }
}

Image upright(Image image, int orientation) {
  if (orientation <= 1 || orientation > 8) return image;
  const bool is_on_its_side = orientation >= 5;
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Image out{is_on_its_side ? image.width : image.height, is_on_its_side ? image.height : image.width,
            std::vector<uint8_t>(image.rgb.size())};
  uint8_t* target = out.rgb.data();
  for (int64_t y = 0; y < out.height; ++y) {
    for (int64_t x = 0; x < out.width; ++x, target += 3) {
      int64_t row = is_on_its_side ? x : y, column = is_on_its_side ? y : x;
      if (from_bottom) row = image.height - 1 - row;
      if (from_right) column = image.width - 1 - column;
      std::memcpy(target, image.rgb.data() + (row * image.width + column) * 3, 3);
    }
  }
  return out;
}

}  // namespace kiln
