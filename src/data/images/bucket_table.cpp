#include "data/images/bucket_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/units.h"

namespace kiln {
namespace {

struct Units {
  int64_t height, width;
};
// ASPECT_RATIO_256 to _2048 of PixArt-Sigma, in sixteenths of the base.
constexpr std::array<Units, 40> kSixteenths = {
    {{8, 32},  {8, 31},  {8, 30},  {8, 29},  {9, 28},  {9, 27},  {9, 26},  {10, 25}, {10, 24}, {11, 23},
     {11, 22}, {11, 21}, {12, 21}, {12, 20}, {13, 19}, {13, 18}, {14, 18}, {14, 17}, {15, 17}, {15, 16},
     {16, 16}, {16, 15}, {17, 15}, {17, 14}, {18, 14}, {18, 13}, {19, 13}, {20, 12}, {21, 12}, {22, 11},
     {23, 11}, {24, 10}, {25, 10}, {26, 9},  {27, 9},  {28, 9},  {29, 8},  {30, 8},  {31, 8},  {32, 8}}};
// ASPECT_RATIO_2880, in units of 64 pixels, with its keys. Five keys are not the quotients of their sizes.
struct KeyedUnits {
  int64_t height, width;
  double key;
};
constexpr std::array<KeyedUnits, 40> k2880 = {
    {{22, 90, 0.25}, {22, 87, 0.26}, {22, 84, 0.27}, {22, 81, 0.28}, {25, 78, 0.32}, {25, 75, 0.33},
     {25, 73, 0.34}, {28, 70, 0.4},  {28, 67, 0.42}, {30, 64, 0.47}, {30, 61, 0.49}, {30, 59, 0.51},
     {33, 60, 0.55}, {33, 56, 0.59}, {36, 53, 0.68}, {36, 50, 0.72}, {39, 50, 0.78}, {39, 47, 0.83},
     {42, 47, 0.89}, {42, 45, 0.93}, {45, 45, 1.0},  {45, 42, 1.07}, {47, 42, 1.12}, {47, 39, 1.21},
     {50, 39, 1.28}, {50, 36, 1.39}, {53, 36, 1.47}, {56, 33, 1.7},  {60, 33, 1.82}, {61, 30, 2.03},
     {64, 30, 2.13}, {67, 28, 2.39}, {70, 28, 2.5},  {73, 25, 2.92}, {75, 25, 3.0},  {78, 25, 3.12},
     {81, 22, 3.68}, {84, 22, 3.82}, {87, 22, 3.95}, {90, 22, 4.0}}};

// Returns height / width rounded to two decimals, halves to even, as Python's round() does.
double key_of(int64_t height, int64_t width) {
  return std::nearbyint(static_cast<double>(height) / static_cast<double>(width) * 100) / 100;
}

std::optional<int64_t> parse_side(std::string_view text) {
  const std::optional<int64_t> side = whole_number(text);
  return side && *side >= 1 ? side : std::nullopt;
}

Bucket parse_bucket(std::string_view text) {
  const size_t cross = text.find('x');
  const auto height = parse_side(text.substr(0, cross));
  const auto width = cross == text.npos ? std::nullopt : parse_side(text.substr(cross + 1));
  if (!height || !width)
    fail("buckets", "expected --buckets to be \"pixart\" or sizes such as 512x512,448x576, got {:?}", text);
  return {.height = *height, .width = *width, .aspect_ratio = key_of(*height, *width)};
}

bool is_published(int64_t base) {
  constexpr std::array<int64_t, 5> kBases = {256, 512, 1024, 2048, 2880};
  return std::ranges::find(kBases, base) != kBases.end();
}

// Returns how far apart the shapes of two buckets are, treating tall and wide ones alike.
double distance(const Bucket& a, const Bucket& b) {
  return std::abs(std::log(a.aspect_ratio / b.aspect_ratio));
}

}  // namespace

std::vector<Bucket> published_buckets(int64_t base) {
  std::vector<Bucket> buckets;
  if (base == 2880) {
    for (const KeyedUnits& units : k2880)
      buckets.push_back({.height = 64 * units.height, .width = 64 * units.width, .aspect_ratio = units.key});
    return buckets;
  }
  if (!is_published(base))
    fail("buckets",
         "PixArt's tables are for --image-size 256, 512, 1024, 2048 and 2880, not {}: give sizes, such "
         "as --buckets 512x512,448x576",
         base);
  for (const auto& [height, width] : kSixteenths)
    buckets.push_back(
        {.height = base / 16 * height, .width = base / 16 * width, .aspect_ratio = key_of(height, width)});
  return buckets;
}

std::vector<Bucket> parse_buckets(const std::string& text, int64_t image_size, int64_t multiple) {
  std::vector<Bucket> buckets;
  if (text == "pixart") {
    buckets = published_buckets(image_size);
  } else {
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      buckets.push_back(parse_bucket(std::string_view(text).substr(begin, end - begin)));
      begin = end + 1;
    }
  }
  for (const Bucket& bucket : buckets)
    if (bucket.height % multiple != 0 || bucket.width % multiple != 0)
      fail("buckets", "expected sides of --buckets to be multiples of {} for the autoencoder, got {}x{}",
           multiple, bucket.height, bucket.width);
  for (size_t i = 0; i < buckets.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (buckets[i].aspect_ratio == buckets[j].aspect_ratio)
        fail("buckets", "{}x{} and {}x{} of --buckets have one aspect ratio, {}: leave one of them out",
             buckets[j].height, buckets[j].width, buckets[i].height, buckets[i].width,
             buckets[i].aspect_ratio);
  return buckets;
}

int64_t side_of(const std::vector<Bucket>& buckets, int64_t multiple) {
  double area = 0;
  for (const Bucket& bucket : buckets) area += static_cast<double>(bucket.height * bucket.width);
  const double side = std::sqrt(area / static_cast<double>(buckets.size()));
  return std::max<int64_t>(std::llround(side / static_cast<double>(multiple)), 1) * multiple;
}

size_t nearest_bucket(const std::vector<Bucket>& buckets, int64_t height, int64_t width) {
  const double ratio = static_cast<double>(height) / static_cast<double>(width);
  const auto nearest =
      std::min_element(buckets.begin(), buckets.end(), [&](const Bucket& a, const Bucket& b) {
        return std::abs(a.aspect_ratio - ratio) < std::abs(b.aspect_ratio - ratio);
      });
  return static_cast<size_t>(nearest - buckets.begin());
}

Bucket bucket_of_ratio(const std::string& ratio, int64_t base, int64_t multiple) {
  constexpr int64_t kMost = 1000;
  const std::string_view text = ratio;
  const size_t colon = text.find(':');
  const auto width = parse_side(text.substr(0, colon));
  const auto height = colon == text.npos ? std::nullopt : parse_side(text.substr(colon + 1));
  if (!width || !height || *width > kMost || *height > kMost)
    fail("buckets", "expected a ratio of width to height such as 16:9, got {:?}", ratio);
  if (is_published(base)) {
    const std::vector<Bucket> buckets = published_buckets(base);
    const Bucket& nearest = buckets[nearest_bucket(buckets, *height, *width)];
    if (nearest.height % multiple == 0 && nearest.width % multiple == 0) return nearest;
  }
  const auto side = [&](int64_t mine, int64_t other) {
    const double pixels =
        static_cast<double>(base) * std::sqrt(static_cast<double>(mine) / static_cast<double>(other));
    return std::max<int64_t>(1, std::llround(pixels / static_cast<double>(multiple))) * multiple;
  };
  const int64_t high = side(*height, *width), wide = side(*width, *height);
  return {.height = high, .width = wide, .aspect_ratio = key_of(high, wide)};
}

std::vector<size_t> merge_small_buckets(const std::vector<Bucket>& buckets, std::vector<int64_t> counts,
                                        int64_t least) {
  std::vector<size_t> target(buckets.size());
  std::iota(target.begin(), target.end(), size_t{0});
  for (;;) {
    size_t smallest = buckets.size(), num_filled = 0;
    for (size_t i = 0; i < buckets.size(); ++i) {
      if (counts[i] == 0) continue;
      ++num_filled;
      if (smallest == buckets.size() || counts[i] < counts[smallest]) smallest = i;
    }
    if (num_filled < 2 || counts[smallest] >= least) return target;
    size_t nearest = buckets.size();
    for (size_t i = 0; i < buckets.size(); ++i) {
      if (i == smallest || counts[i] == 0) continue;
      if (nearest == buckets.size() ||
          distance(buckets[i], buckets[smallest]) < distance(buckets[nearest], buckets[smallest]))
        nearest = i;
    }
    counts[nearest] += counts[smallest];
    counts[smallest] = 0;
    std::replace(target.begin(), target.end(), smallest, nearest);
  }
}

}  // namespace kiln
