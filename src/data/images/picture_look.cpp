#include "data/images/picture_look.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace kiln {

namespace {

constexpr int64_t kLookSide = 512;
constexpr int kPlainRange = 8;       // levels between the lightest and the darkest grey of a plain picture
constexpr int kMostDifference = 24;  // levels between two greys of pictures that look alike

struct Greys {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> values{};
  int at(int64_t y, int64_t x) const { return values[static_cast<size_t>(y * width + x)]; }
};

// Averages squares of `shrink` x `shrink` pixels, with Pillow's weights of the colours.
Greys greys_of(const Image& image, int64_t shrink) {
  shrink = std::min({shrink, image.height, image.width});
  Greys greys{.height = image.height / shrink, .width = image.width / shrink};
  greys.values.resize(static_cast<size_t>(greys.height * greys.width));
  std::vector<int64_t> sums(static_cast<size_t>(greys.width));
  for (int64_t y = 0; y < greys.height; ++y) {
    std::ranges::fill(sums, 0);
    for (int64_t row = y * shrink; row < (y + 1) * shrink; ++row) {
      const uint8_t* pixel = image.rgb.data() + row * image.width * 3;
      for (int64_t x = 0; x < greys.width; ++x)
        for (int64_t i = 0; i < shrink; ++i, pixel += 3)
          sums[static_cast<size_t>(x)] += 299 * pixel[0] + 587 * pixel[1] + 114 * pixel[2];
    }
    for (int64_t x = 0; x < greys.width; ++x)
      greys.values[static_cast<size_t>(y * greys.width + x)] =
          static_cast<uint8_t>(sums[static_cast<size_t>(x)] / (1000 * shrink * shrink));
  }
  return greys;
}

double laplacian_variance(const Greys& greys) {
  int64_t sum = 0, squares = 0;
  for (int64_t y = 1; y + 1 < greys.height; ++y)
    for (int64_t x = 1; x + 1 < greys.width; ++x) {
      const int64_t value = 4 * greys.at(y, x) - greys.at(y - 1, x) - greys.at(y + 1, x) -
                            greys.at(y, x - 1) - greys.at(y, x + 1);
      sum += value;
      squares += value * value;
    }
  const auto count = static_cast<double>(std::max<int64_t>((greys.height - 2) * (greys.width - 2), 1));
  const double mean = static_cast<double>(sum) / count;
  return static_cast<double>(squares) / count - mean * mean;
}

uint8_t mean_grey(const Greys& greys, int64_t row, int64_t column) {
  const int64_t top = row * greys.height / kLookRows, left = column * greys.width / kLookColumns;
  const int64_t bottom = std::max((row + 1) * greys.height / kLookRows, top + 1),
                right = std::max((column + 1) * greys.width / kLookColumns, left + 1);
  int64_t sum = 0;
  for (int64_t y = top; y < bottom; ++y)
    for (int64_t x = left; x < right; ++x) sum += greys.at(y, x);
  const int64_t count = (bottom - top) * (right - left);
  return static_cast<uint8_t>((sum + count / 2) / count);
}

bool look_alike(const PictureLook& a, const PictureLook& b, int most_bits) {
  if (std::popcount(a.hash ^ b.hash) > most_bits) return false;
  for (size_t i = 0; i < a.greys.size(); ++i)
    if (std::abs(a.greys[i] - b.greys[i]) > kMostDifference) return false;
  return true;
}

}  // namespace

int64_t look_shrink(int64_t height, int64_t width) {
  int64_t shrink = 1;
  while (std::max(height, width) > kLookSide * shrink) shrink *= 2;
  return shrink;
}

PictureLook look_of(const Image& image, int64_t shrink) {
  const Greys greys = greys_of(image, shrink);
  PictureLook look{.sharpness = laplacian_variance(greys)};
  for (int64_t row = 0; row < kLookRows; ++row)
    for (int64_t column = 0; column < kLookColumns; ++column) {
      uint8_t* const grey = &look.greys[static_cast<size_t>(row * kLookColumns + column)];
      *grey = mean_grey(greys, row, column);
      // Noise of an even ground counts for nothing: a level is no difference. The bits are strewn, so that
      // pictures with the same border differ in each group of an index.
      constexpr int64_t kStride = 37, kNumBits = 64;
      if (column > 0 && grey[0] > grey[-1] + 1)
        look.hash |= uint64_t{1} << ((row * (kLookColumns - 1) + column - 1) * kStride % kNumBits);
    }
  const auto [darkest, lightest] = std::ranges::minmax(look.greys);
  look.is_plain = lightest - darkest < kPlainRange;
  return look;
}

LookIndex::LookIndex(int most_bits) : most_bits_(most_bits), by_group_(static_cast<size_t>(most_bits) + 1) {}

uint64_t LookIndex::group(uint64_t hash, size_t number) const {
  const size_t begin = 64 * number / by_group_.size(), end = 64 * (number + 1) / by_group_.size();
  return end - begin == 64 ? hash : hash >> begin & ((uint64_t{1} << (end - begin)) - 1);
}

std::optional<int64_t> LookIndex::find_or_add(int64_t picture, const PictureLook& look) {
  if (look.is_plain) return std::nullopt;
  size_t first = known_.size();
  for (size_t number = 0; number < by_group_.size(); ++number) {
    const auto found = by_group_[number].find(group(look.hash, number));
    if (found == by_group_[number].end()) continue;
    for (const size_t other : found->second) {
      if (other >= first) break;  // they ascend
      if (look_alike(known_[other].look, look, most_bits_)) first = other;
    }
  }
  if (first < known_.size()) return known_[first].picture;
  for (size_t number = 0; number < by_group_.size(); ++number)
    by_group_[number][group(look.hash, number)].push_back(known_.size());
  known_.push_back({picture, look});
  return std::nullopt;
}

}  // namespace kiln
