#include "data/images/picture_look.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "core/error.h"
#include "test_images.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Gt;
using ::testing::Le;
using ::testing::Lt;

// Discs of different greys at places that the seed chooses.
Image discs(int64_t side, uint32_t seed) {
  Image image{side, side, std::vector<uint8_t>(static_cast<size_t>(3 * side * side), 200)};
  uint32_t state = seed * 2654435761u + 1;
  const auto draw = [&](int64_t below) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int64_t>(state >> 16) % below;
  };
  for (int disc = 0; disc < 12; ++disc) {
    const int64_t x = draw(256), y = draw(256), radius = 20 + draw(50), grey = draw(256);
    for (int64_t row = 0; row < side; ++row)
      for (int64_t column = 0; column < side; ++column) {
        const int64_t dx = column * 256 / side - x, dy = row * 256 / side - y;
        if (dx * dx + dy * dy > radius * radius) continue;
        for (int64_t c = 0; c < 3; ++c)
          image.rgb[static_cast<size_t>(3 * (row * side + column) + c)] = static_cast<uint8_t>(grey);
      }
  }
  return image;
}

PictureLook seen(const Image& image) { return look_of(image, look_shrink(image.height, image.width)); }

TEST(PictureLook, ShrinksTheLongerSideTo512) {
  EXPECT_EQ(look_shrink(512, 100), 1);
  EXPECT_EQ(look_shrink(100, 513), 2);
  EXPECT_EQ(look_shrink(4096, 3000), 8);
  EXPECT_EQ(look_shrink(1, 1), 1);
}

TEST(PictureLook, SharpnessIsTheVarianceOfTheLaplacian) {
  Image dot{3, 5, std::vector<uint8_t>(45, 0)};  // one white pixel: the Laplacian is 1020, -255 and 0
  for (size_t c = 0; c < 3; ++c) dot.rgb[3 * (5 + 1) + c] = 255;
  const double mean = (1020.0 - 255) / 3, square = (1020.0 * 1020 + 255 * 255) / 3;
  EXPECT_NEAR(look_of(dot, 1).sharpness, square - mean * mean, 1e-6);
  const Image sharp = discs(512, 1);
  const Image blurred = resize_bicubic(resize_bicubic(sharp, 48, 48), 512, 512);
  EXPECT_THAT(seen(sharp).sharpness, Gt(100));
  EXPECT_THAT(seen(blurred).sharpness, Lt(30));
}

TEST(PictureLook, OtherSizesAndCompressionLookTheSame) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    LookIndex index(3);
    const Image picture = discs(512, seed);
    EXPECT_EQ(index.find_or_add(7, seen(picture)), std::nullopt);
    EXPECT_EQ(index.find_or_add(8, seen(resize_bicubic(picture, 300, 300))), 7);
    const auto jpeg = test::encode_jpeg(picture);
    for (const int shrink : {1, 2}) {
      const Image decoded = decode_image(std::as_bytes(std::span(jpeg)), "a.jpg", kMaxImagePixels, shrink);
      EXPECT_EQ(decoded.height, 512 / shrink);
      EXPECT_EQ(index.find_or_add(9, look_of(decoded, 1)), 7) << shrink;
    }
  }
}

TEST(PictureLook, DifferentPicturesLookDifferent) {
  LookIndex index(3);
  for (int64_t i = 0; i < 200; ++i)
    EXPECT_EQ(index.find_or_add(i, seen(discs(64, static_cast<uint32_t>(i)))), std::nullopt) << i;
}

TEST(PictureLook, AnIndexFindsWhatComparingAllFinds) {
  for (const int most_bits : {0, 1, 3, 7}) {
    LookIndex index(most_bits);
    std::vector<uint64_t> known;
    uint64_t state = 1;
    for (int64_t i = 0; i < 600; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      // Each third one is an earlier one with some bits changed.
      uint64_t hash =
          i % 3 == 2 ? known[static_cast<size_t>(state >> 33) % known.size()] : state ^ state >> 29;
      for (int64_t bit = 0; i % 3 == 2 && bit < i % 10; ++bit)
        hash ^= uint64_t{1} << ((state >> 20) + bit * 7) % 64;
      PictureLook look;
      look.hash = hash;
      std::optional<int64_t> expected;
      for (size_t j = 0; j < known.size() && !expected; ++j)
        if (std::popcount(known[j] ^ hash) <= most_bits) expected = static_cast<int64_t>(j);
      EXPECT_EQ(index.find_or_add(std::ssize(known), look), expected);
      if (!expected) known.push_back(hash);
    }
  }
}

TEST(PictureLook, PlainPicturesLookLikeNoOther) {
  LookIndex index(3);
  const Image plain{64, 64, std::vector<uint8_t>(64 * 64 * 3, 255)};
  EXPECT_TRUE(seen(plain).is_plain);
  EXPECT_EQ(index.find_or_add(0, seen(plain)), std::nullopt);
  EXPECT_EQ(index.find_or_add(1, seen(plain)), std::nullopt);
}

TEST(PictureLook, ThinPicturesHaveALook) {
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{1, 5000}, {3000, 2}, {1, 1}};
  for (const auto& [height, width] : sizes)
    EXPECT_THAT(seen(test::make_picture(height, width)).sharpness, AllOf(Ge(0), Le(1e7)));
}

// A JPEG that decodes in full decodes in reduced size, and one that is refused is refused.
TEST(ShrunkJpeg, RefusesTheSameFiles) {
  const Image picture = test::make_picture(70, 90);
  for (const bool progressive : {false, true}) {
    const std::vector<uint8_t> whole = test::encode_jpeg(picture, progressive);
    const auto is_refused = [](const std::vector<uint8_t>& file, int shrink) {
      try {
        decode_image(std::as_bytes(std::span(file)), "a.jpg", kMaxImagePixels, shrink);
        return false;
      } catch (const Error&) {
        return true;
      }
    };
    for (size_t place = 3; place < whole.size(); place += 7) {
      const std::vector<uint8_t> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(place));
      std::vector<uint8_t> damaged = whole;
      damaged[place] ^= 0x5a;
      for (const int shrink : {2, 4, 8}) {
        EXPECT_EQ(is_refused(cut, shrink), is_refused(cut, 1)) << place;
        EXPECT_EQ(is_refused(damaged, shrink), is_refused(damaged, 1)) << place;
      }
    }
    const Image shrunk = decode_image(std::as_bytes(std::span(whole)), "a.jpg", kMaxImagePixels, 8);
    EXPECT_EQ(std::pair(shrunk.height, shrunk.width), std::pair(int64_t{9}, int64_t{12}));
  }
}

}  // namespace
}  // namespace kiln
