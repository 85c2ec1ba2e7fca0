#include "plan/price/machine_profile.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/measuring.h"
#include "core/philox.h"
#include "data/images/image_codecs.h"
#include "extract/picture_lanes.h"

namespace kiln {

namespace {

constexpr int64_t kSmall = 256, kLarge = 1024;  // sides of the measured pictures
constexpr int kQuality = 90;
constexpr double kSecondsEach = 0.08;  // of one kind of picture in one size

// Returns a picture whose amplitudes fall as 1 / frequency, as those of photographs do: octaves of noise,
// each enlarged bicubically. The finest has the grain of a sensor.
Image photograph_like(int64_t side) {
  constexpr double kCoarsest = 40, kFinest = 6;
  std::vector<double> sums(static_cast<size_t>(3 * side * side), 128.0);
  uint32_t stream = 0;
  for (int64_t cells = 4; cells <= side; cells *= 2, ++stream) {
    Image noise{cells, cells, std::vector<uint8_t>(static_cast<size_t>(3 * cells * cells))};
    for (size_t i = 0; i < noise.rgb.size(); ++i)
      noise.rgb[i] =
          static_cast<uint8_t>(philox4x32_10({static_cast<uint32_t>(i), stream, 0, 0}, {7, 0})[0] >> 24);
    const Image octave = resize_bicubic(noise, side, side);
    const double amplitude = std::max(kFinest, kCoarsest * 4 / static_cast<double>(cells)) / 128;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += amplitude * (octave.rgb[i] - 127.5);
  }
  Image image{side, side, std::vector<uint8_t>(sums.size())};
  for (size_t i = 0; i < sums.size(); ++i)
    image.rgb[i] = static_cast<uint8_t>(std::clamp(sums[i], 0.0, 255.0));
  return image;
}

// Returns the least seconds of a call.
double least_seconds(const std::function<void()>& work) {
  double least = 1e9;
  const double begin = thread_seconds();
  do {
    const double start = thread_seconds();
    work();
    least = std::min(least, thread_seconds() - start);
  } while (thread_seconds() - begin < kSecondsEach);
  return least;
}

PictureRate through(double small_s, double large_s) {
  constexpr double kSmallPixels = kSmall * kSmall, kLargePixels = kLarge * kLarge;
  const double pixel_s = std::max(0.0, large_s - small_s) / (kLargePixels - kSmallPixels);
  return {.fixed_s = std::max(0.0, small_s - pixel_s * kSmallPixels), .pixel_s = pixel_s};
}

std::vector<std::byte> file_of(const Image& image, PictureFormat format) {
  if (format == PictureFormat::kJpeg) return codecs::encode_jpeg(image, kQuality);
  if (format == PictureFormat::kWebp) return codecs::encode_webp(image, kQuality);
  const std::vector<uint8_t> png = encode_png(image);
  const auto* const begin = reinterpret_cast<const std::byte*>(png.data());
  return {begin, begin + png.size()};
}

}  // namespace

double DecodingRates::seconds(const ImageHeader& picture, int64_t square) const {
  auto pixels = static_cast<double>(picture.height * picture.width);
  double seconds = formats.at(picture.format).seconds(pixels);
  if (square == 0) return seconds + crop.seconds(pixels);
  int64_t side = std::min(picture.height, picture.width);
  for (; side >= 2 * square; side /= 2, pixels /= 4) seconds += halve.seconds(pixels);
  const auto resized = static_cast<double>(std::max(side, square));
  return seconds + crop.seconds(resized * resized);
}

DecodingRates builtin_decoding() {
  constexpr double kNano = 1e-9;
  return {.formats = {{PictureFormat::kJpeg, {.pixel_s = 3.1 * kNano}},
                      {PictureFormat::kPng, {.pixel_s = 25 * kNano}},
                      {PictureFormat::kWebp, {.pixel_s = 11 * kNano}}},
          .halve = {.pixel_s = 1.1 * kNano},
          .crop = {.pixel_s = 10.5 * kNano}};
}

DecodingRates measure_decoding() {
  const Image small = photograph_like(kSmall), large = photograph_like(kLarge);
  DecodingRates rates{.is_measured = true};
  for (const auto& [format, name] : Choices<PictureFormat>::kAll) {
    const auto decode_s = [format = format](const Image& image) {
      const std::vector<std::byte> file = file_of(image, format);
      return least_seconds([&] { decode_image(file, "calibration"); });
    };
    rates.formats[format] = through(decode_s(small), decode_s(large));
  }
  const auto halve_s = [](const Image& image) {
    return least_seconds([&] { center_crop(image, image.height / 2); });
  };
  rates.halve = through(halve_s(small), halve_s(large));
  // Two thirds of the side, between the sizes that are not resized and that are halved.
  const auto crop_s = [](const Image& image) {
    const int64_t side = image.height * 2 / 3;
    std::vector<float> values(static_cast<size_t>(3 * side * side));
    return least_seconds([&] { write_image_values(center_crop(image, side), false, values); });
  };
  rates.crop = through(crop_s(small), crop_s(large));
  return rates;
}

}  // namespace kiln
