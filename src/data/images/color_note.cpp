#include "data/images/color_note.h"

#include <fmt/format.h>
#include <spng.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <string_view>

namespace kiln {

namespace {

constexpr size_t kMostProfileBytes = size_t{16} << 20;

struct Colors {
  std::string profile{};  // ICC
  bool is_cmyk = false, has_alpha = false, has_16_bits = false;
};

// Numbers and texts at places of a file or a profile, which may be cut off: then they are 0 or short.
class ProfileBytes {
 public:
  explicit ProfileBytes(std::string_view bytes) : bytes_(bytes) {}
  size_t size() const { return bytes_.size(); }
  std::string_view text(size_t at, size_t count) const {
    return at < bytes_.size() ? bytes_.substr(at, count) : std::string_view();
  }
  size_t number(size_t at, size_t num_bytes, bool is_little = false) const {
    size_t value = 0;
    for (size_t i = 0; i < num_bytes && at + num_bytes <= bytes_.size(); ++i)
      value = value << 8 | static_cast<unsigned char>(bytes_[at + (is_little ? num_bytes - 1 - i : i)]);
    return value;
  }

 private:
  std::string_view bytes_;
};

Colors colors_of_jpeg(const ProfileBytes& file) {
  constexpr std::string_view kProfile{"ICC_PROFILE\0", 12};
  constexpr size_t kNumbers = 2;  // of this piece and of all, behind that
  Colors colors;
  for (size_t at = 2; at + 4 <= file.size();) {
    const size_t marker = file.number(at + 1, 1);
    if (file.number(at, 1) != 0xff || marker == 0xff || marker == 0) {
      ++at;
      continue;
    }
    const bool stands_alone = marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8);
    if (marker == 0xd9 || marker == 0xda) break;
    const size_t length = stands_alone ? 0 : file.number(at + 2, 2);
    if (marker == 0xe2 && file.text(at + 4, kProfile.size()) == kProfile && length > 16)
      colors.profile +=
          file.text(at + 4 + kProfile.size() + kNumbers, length - 2 - kProfile.size() - kNumbers);
    if (marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc)
      colors.is_cmyk = file.number(at + 9, 1) == 4;
    at += 2 + length;
  }
  return colors;
}

Colors colors_of_png(std::span<const std::byte> file) {
  Colors colors;
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> context(spng_ctx_new(0), spng_ctx_free);
  spng_ihdr header{};
  if (!context || spng_set_chunk_limits(context.get(), kMostProfileBytes, kMostProfileBytes) != SPNG_OK ||
      spng_set_png_buffer(context.get(), file.data(), file.size()) != SPNG_OK ||
      spng_get_ihdr(context.get(), &header) != SPNG_OK)
    return colors;
  spng_trns transparency{};
  spng_iccp profile{};
  colors.has_16_bits = header.bit_depth == 16;
  colors.has_alpha = header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ||
                     header.color_type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA ||
                     spng_get_trns(context.get(), &transparency) == SPNG_OK;
  if (spng_get_iccp(context.get(), &profile) == SPNG_OK)
    colors.profile.assign(profile.profile, profile.profile_len);
  return colors;
}

Colors colors_of_webp(const ProfileBytes& file) {
  Colors colors;
  constexpr size_t kFirst = 12, kHead = 8;
  if (file.text(kFirst, 4) == "VP8L") colors.has_alpha = (file.number(21, 4, true) >> 28 & 1) != 0;
  if (file.text(kFirst, 4) != "VP8X") return colors;
  colors.has_alpha = (file.number(kFirst + kHead, 1) & 0x10) != 0;
  for (size_t at = kFirst; at + kHead <= file.size();) {
    const size_t length = file.number(at + 4, 4, true);
    if (file.text(at, 4) == "ICCP") colors.profile = file.text(at + kHead, length);
    at += kHead + length + length % 2;
  }
  return colors;
}

// Returns what a profile calls itself (ICC.1, the tag desc: a textDescriptionType of version 2 or a
// multiLocalizedUnicodeType of version 4, of which the first text is taken).
std::string profile_name(const ProfileBytes& profile) {
  constexpr size_t kTags = 128, kTagBytes = 12, kMostName = 100;
  const size_t num_tags = std::min<size_t>(profile.number(kTags, 4), kMostName);
  std::string name;
  for (size_t tag = kTags + 4; tag < kTags + 4 + num_tags * kTagBytes; tag += kTagBytes) {
    if (profile.text(tag, 4) != "desc") continue;
    const size_t at = profile.number(tag + 4, 4);
    if (profile.text(at, 4) == "desc")
      name = profile.text(at + 12, std::min(profile.number(at + 8, 4), kMostName));
    if (profile.text(at, 4) == "mluc")
      for (size_t i = 0; i < std::min(profile.number(at + 20, 4), 2 * kMostName); i += 2) {
        const size_t unit = profile.number(at + profile.number(at + 24, 4) + i, 2);
        name += unit < 0x80 ? static_cast<char>(unit) : '?';
      }
  }
  return name.substr(0, name.find('\0'));
}

// Programs call it "sRGB IEC61966-2.1" or "GIMP built-in sRGB". Two profiles made to be small have own names.
bool is_srgb(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name.find("srgb") != std::string::npos || name == "c2" || name == "urgb";
}

}  // namespace

std::string color_note(std::span<const std::byte> file, PictureFormat format) {
  const ProfileBytes places({reinterpret_cast<const char*>(file.data()), file.size()});
  const Colors colors = format == PictureFormat::kJpeg  ? colors_of_jpeg(places)
                        : format == PictureFormat::kPng ? colors_of_png(file)
                                                        : colors_of_webp(places);
  const std::string name = profile_name(ProfileBytes(colors.profile));
  if (colors.is_cmyk) return "CMYK, converted without a profile";
  if (!colors.profile.empty() && !is_srgb(name))
    return fmt::format("its colour profile {} is not applied", name.empty() ? "without a name" : name);
  if (colors.has_alpha) return "transparent parts become white";
  return colors.has_16_bits ? "16 bits a channel, of which 8 are kept" : "";
}

}  // namespace kiln
