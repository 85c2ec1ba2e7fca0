// How long one thread takes to read a picture, by file format and size.
#pragma once
#include <array>
#include <cstdint>

#include "data/images/image_header.h"

namespace kiln {

// Seconds of a picture: a fixed part and one for each pixel.
struct PictureRate {
  double fixed_s = 0, pixel_s = 0;
  double seconds(double pixels) const { return fixed_s + pixels * pixel_s; }
};

struct DecodingRates {
  std::array<PictureRate, std::size(kPictureFormats)> formats{};  // by PictureFormat, of pixels as stored
  PictureRate crop{};  // resizing, cropping and conversion to values, of pixels as stored
  bool is_measured = false;

  // Seconds from a file in memory to an autoencoder's input.
  double seconds(PictureFormat format, double pixels) const {
    return formats[static_cast<size_t>(format)].seconds(pixels) + crop.seconds(pixels);
  }
};

// Those of one core of a server's processor (benchmarks/results/picture-formats_*): photographs, JPEG of
// quality 90, PNG of zlib's usual level, lossy WebP of quality 90.
DecodingRates builtin_decoding();

// Measures one thread on this machine with pictures that have the spectrum of photographs. Takes about a
// second.
DecodingRates measure_decoding();

}  // namespace kiln
