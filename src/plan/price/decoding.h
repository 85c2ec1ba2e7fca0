// How long one thread takes to read a picture, by file format and size.
#pragma once
#include <map>

#include "data/images/image_header.h"

namespace kiln {

// Seconds of a picture: a fixed part and one for each pixel.
struct PictureRate {
  double fixed_s = 0, pixel_s = 0;
  double seconds(double pixels) const { return fixed_s + pixels * pixel_s; }
};

struct DecodingRates {
  std::map<PictureFormat, PictureRate> formats{};  // decoding, of pixels as stored
  PictureRate halve{};  // halving a picture of twice the wanted sides or more, of its pixels
  PictureRate crop{};   // resizing, cropping and conversion to values, of the pixels that are resized
  bool is_measured = false;

  // Returns the seconds from a file in memory to an autoencoder's input: a square of this side, or if that is
  // 0 a bucket, for which nothing is halved.
  double seconds(const ImageHeader& picture, int64_t square) const;
};

// Those of one core of a server's processor: decoding and halving of photographs as measured in
// benchmarks/results/picture-formats_* (JPEG of quality 90, PNG of zlib's usual level, lossy WebP of quality
// 90), and crops as measure_decoding() finds them there.
DecodingRates builtin_decoding();

// Measures one thread on this machine with pictures that have the spectrum of photographs. Takes about a
// second.
DecodingRates measure_decoding();

}  // namespace kiln
