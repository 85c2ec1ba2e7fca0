// Pillow's separable resampling of 8-bit images, bit for bit: weights in double precision, rounded to fixed
// point with 22 fractional bits; one axis after the other, each pass rounded and clipped to 8 bits.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "data/images/images.h"

namespace kiln {
namespace {

constexpr int kFractionBits = 22;

struct Filter {
  double support;
  double (*weight)(double);
};

double box_weight(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

// Keys' cubic convolution with a = -0.5.
double bicubic_weight(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos_weight(double x) { return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

constexpr Filter kBox{0.5, box_weight};
constexpr Filter kBicubic{2.0, bicubic_weight};
constexpr Filter kLanczos{3.0, lanczos_weight};

// The input samples that make one output sample.
struct Taps {
  int64_t first = 0;
  std::vector<int32_t> weights;  // fixed point
};

// Returns the taps of outputs [begin, end) of an axis that is resized from `in_size` to `out_size` samples.
std::vector<Taps> make_taps(const Filter& filter, int64_t in_size, int64_t out_size, int64_t begin,
                            int64_t end) {
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  const double stretch = std::max(scale, 1.0);  // antialiasing: the filter grows when shrinking
  const double support = filter.support * stretch;
  const double inverse_stretch = 1.0 / stretch;
  std::vector<Taps> all;
  all.reserve(end - begin);
  std::vector<double> weights;
  for (int64_t out = begin; out < end; ++out) {
    const double center = (static_cast<double>(out) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t last = std::min<int64_t>(static_cast<int64_t>(center + support + 0.5), in_size);
    double sum = 0;
    weights.clear();
    for (int64_t in = first; in < last; ++in) {
      weights.push_back(filter.weight((static_cast<double>(in) - center + 0.5) * inverse_stretch));
      sum += weights.back();
    }
    Taps taps{first, {}};
    taps.weights.reserve(weights.size());
    for (double weight : weights) {
      if (sum != 0.0) weight /= sum;
      const double fixed = weight * (1 << kFractionBits);
      taps.weights.push_back(static_cast<int32_t>(fixed < 0 ? fixed - 0.5 : fixed + 0.5));
    }
    all.push_back(std::move(taps));
  }
  return all;
}

uint8_t to_pixel(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kFractionBits, 0, 255)); }

// Resizes each of the rows [first_row, last_row) of `in` with `taps`.
Image horizontal_pass(const Image& in, const std::vector<Taps>& taps, int64_t first_row, int64_t last_row) {
  const int64_t width = static_cast<int64_t>(taps.size());
  Image out{last_row - first_row, width, std::vector<uint8_t>((last_row - first_row) * width * 3)};
  uint8_t* target = out.rgb.data();
  for (int64_t y = first_row; y < last_row; ++y) {
    const uint8_t* row = in.rgb.data() + y * in.width * 3;
    for (const Taps& tap : taps) {
      const uint8_t* source = row + tap.first * 3;
      int32_t red = 1 << (kFractionBits - 1), green = red, blue = red;
      for (int32_t weight : tap.weights) {
        red += source[0] * weight;
        green += source[1] * weight;
        blue += source[2] * weight;
        source += 3;
      }
      target[0] = to_pixel(red);
      target[1] = to_pixel(green);
      target[2] = to_pixel(blue);
      target += 3;
    }
  }
  return out;
}

// `in` holds the rows from `row_offset` on.
Image vertical_pass(const Image& in, const std::vector<Taps>& taps, int64_t row_offset) {
  const int64_t row_bytes = in.width * 3;
  Image out{static_cast<int64_t>(taps.size()), in.width, std::vector<uint8_t>(taps.size() * row_bytes)};
  std::vector<int32_t> sums(row_bytes);
  uint8_t* target = out.rgb.data();
  for (const Taps& tap : taps) {
    std::fill(sums.begin(), sums.end(), 1 << (kFractionBits - 1));
    const uint8_t* source = in.rgb.data() + (tap.first - row_offset) * row_bytes;
    for (int32_t weight : tap.weights) {
      for (int64_t i = 0; i < row_bytes; ++i) sums[i] += source[i] * weight;
      source += row_bytes;
    }
    for (int64_t i = 0; i < row_bytes; ++i) target[i] = to_pixel(sums[i]);
    target += row_bytes;
  }
  return out;
}

// True if the vertical pass comes first, which changes the rounding. Pillow chooses so since version 13;
// before, the horizontal pass always came first.
bool is_vertical_first(const Image& image, int64_t height, int64_t width) {
  const int64_t rows_saved = image.height - height, columns_saved = image.width - width;
  return rows_saved > 0 && rows_saved > 2 * columns_saved;
}

struct Window {
  int64_t y, x, height, width;
};

// Resizes the image to (height, width) and returns a window of the result. Computes nothing outside of it.
Image resize_window(const Image& image, const Filter& filter, int64_t height, int64_t width,
                    const Window& window) {
  if (image.height < 1 || image.width < 1 || height < 1 || width < 1)
    fail("resize", "expected positive sizes, got {} x {} to {} x {}", image.width, image.height, width,
         height);
  const auto columns = make_taps(filter, image.width, width, window.x, window.x + window.width);
  const auto rows = make_taps(filter, image.height, height, window.y, window.y + window.height);
  if (is_vertical_first(image, height, width))
    return horizontal_pass(vertical_pass(image, rows, 0), columns, 0, window.height);
  const int64_t first_row = rows.front().first;
  const int64_t last_row = rows.back().first + static_cast<int64_t>(rows.back().weights.size());
  return vertical_pass(horizontal_pass(image, columns, first_row, last_row), rows, first_row);
}

Image resize(const Image& image, const Filter& filter, int64_t height, int64_t width) {
  if (height == image.height && width == image.width) return image;
  return resize_window(image, filter, height, width, {0, 0, height, width});
}

// Halves an image of even sizes with the box filter, whose passes are then (a + b + 1) / 2.
Image halve_even(const Image& image) {
  Image out{image.height / 2, image.width / 2,
            std::vector<uint8_t>(image.height / 2 * (image.width / 2) * 3)};
  const int64_t row_bytes = image.width * 3;
  uint8_t* target = out.rgb.data();
  for (int64_t y = 0; y < out.height; ++y) {
    const uint8_t* upper = image.rgb.data() + 2 * y * row_bytes;
    for (int64_t x = 0; x < out.width; ++x, upper += 6, target += 3) {
      const uint8_t* lower = upper + row_bytes;
      for (int c = 0; c < 3; ++c) {
        const int first = (upper[c] + upper[c + 3] + 1) >> 1, second = (lower[c] + lower[c + 3] + 1) >> 1;
        target[c] = static_cast<uint8_t>((first + second + 1) >> 1);
      }
    }
  }
  return out;
}

Image halve(const Image& image) {
  const int64_t height = image.height / 2, width = image.width / 2;
  const bool is_even = image.height % 2 == 0 && image.width % 2 == 0;
  if (is_even && !is_vertical_first(image, height, width)) return halve_even(image);
  return resize(image, kBox, height, width);
}

// Python's round(): halves to even.
int64_t round_half_even(double value) { return static_cast<int64_t>(std::nearbyint(value)); }

}  // namespace

Image resize_bicubic(const Image& image, int64_t height, int64_t width) {
  return resize(image, kBicubic, height, width);
}

Image center_crop(const Image& image, int64_t size) {
  if (size < 1 || image.height < 1 || image.width < 1)
    fail("center_crop", "expected positive sizes, got {} x {} to {}", image.width, image.height, size);
  Image halved;
  const Image* current = &image;
  while (std::min(current->height, current->width) >= 2 * size) {
    halved = halve(*current);
    current = &halved;
  }
  const double scale =
      static_cast<double>(size) / static_cast<double>(std::min(current->height, current->width));
  const int64_t height = round_half_even(static_cast<double>(current->height) * scale);
  const int64_t width = round_half_even(static_cast<double>(current->width) * scale);
  const Window window{(height - size) / 2, (width - size) / 2, size, size};
  if (height == size && width == size && current->height == size && current->width == size) return *current;
  return resize_window(*current, kBicubic, height, width, window);
}

Image cover_crop(const Image& image, int64_t height, int64_t width, Resampling resampling) {
  if (height < 1 || width < 1 || image.height < 1 || image.width < 1)
    fail("cover_crop", "expected positive sizes, got {} x {} to {} x {}", image.width, image.height, width,
         height);
  int64_t covered_height = height, covered_width = width;
  if (height * image.width > width * image.height)
    covered_width = std::max(image.width * height / image.height, width);
  else
    covered_height = std::max(image.height * width / image.width, height);
  const Window window{round_half_even(static_cast<double>(covered_height - height) / 2),
                      round_half_even(static_cast<double>(covered_width - width) / 2), height, width};
  if (covered_height == image.height && covered_width == image.width && height == image.height &&
      width == image.width)
    return image;
  return resize_window(image, resampling == Resampling::kLanczos ? kLanczos : kBicubic, covered_height,
                       covered_width, window);
}

}  // namespace kiln
