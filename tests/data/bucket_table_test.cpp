#include "data/images/bucket_table.h"

#include <cmath>

#include "data/images/images.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(Buckets, PublishedTablesHaveAboutTheBasesPixels) {
  for (const int64_t base : {256, 512, 1024, 2048, 2880}) {
    const std::vector<Bucket> buckets = published_buckets(base);
    ASSERT_EQ(buckets.size(), 40u);
    double last = 0;
    for (const Bucket& bucket : buckets) {
      const double pixels = static_cast<double>(bucket.height * bucket.width),
                   square = static_cast<double>(base * base);
      EXPECT_NEAR(pixels / square, 1, 0.13) << base << " " << bucket.height;
      EXPECT_GT(bucket.aspect_ratio, last);
      EXPECT_NEAR(bucket.aspect_ratio, static_cast<double>(bucket.height) / static_cast<double>(bucket.width),
                  0.1);
      last = bucket.aspect_ratio;
    }
  }
  // Spot checks against the published dictionaries, halves rounded to even.
  const std::vector<Bucket> buckets = published_buckets(1024);
  EXPECT_EQ(buckets[15].height, 832);
  EXPECT_EQ(buckets[15].width, 1152);
  EXPECT_EQ(buckets[15].aspect_ratio, 0.72);
  EXPECT_EQ(buckets[36].aspect_ratio, 3.62);
  EXPECT_EQ(buckets[38].aspect_ratio, 3.88);
  EXPECT_EQ(published_buckets(2880)[0].aspect_ratio, 0.25);
}

TEST(Buckets, PicturesGoToTheNearestKey) {
  const std::vector<Bucket> buckets = published_buckets(512);
  EXPECT_EQ(buckets[nearest_bucket(buckets, 700, 700)].aspect_ratio, 1.0);
  EXPECT_EQ(buckets[nearest_bucket(buckets, 1, 100)].aspect_ratio, 0.25);
  EXPECT_EQ(buckets[nearest_bucket(buckets, 9000, 100)].aspect_ratio, 4.0);
  EXPECT_EQ(buckets[nearest_bucket(buckets, 480, 640)].aspect_ratio,
            0.72);  // 0.75: 0.78 is as near, and later
}

TEST(Buckets, CustomSizesAreRead) {
  const std::vector<Bucket> buckets = parse_buckets("64x64,48x96", 64, 8);
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[1].height, 48);
  EXPECT_EQ(buckets[1].aspect_ratio, 0.5);
  EXPECT_EQ(parse_buckets("pixart", 256, 8).size(), 40u);
  EXPECT_ERROR(parse_buckets("64x64,", 64, 8), "512x512,448x576");
  EXPECT_ERROR(parse_buckets("64", 64, 8), "got \"64\"");
  EXPECT_ERROR(parse_buckets("64x60", 64, 8), "multiples of 8");
  EXPECT_ERROR(parse_buckets("64x64,32x32", 64, 8), "one aspect ratio, 1");
  EXPECT_ERROR(parse_buckets("pixart", 300, 8), "not 300");
}

TEST(Buckets, OfARatio) {
  const auto sides = [](const char* ratio, int64_t base, int64_t multiple) {
    const Bucket bucket = bucket_of_ratio(ratio, base, multiple);
    return std::vector{bucket.height, bucket.width};
  };
  EXPECT_THAT(sides("16:9", 1024, 16), ElementsAre(768, 1344));  // PixArt's, whose key is 0.57
  EXPECT_THAT(sides("9:16", 1024, 16), ElementsAre(1344, 768));
  EXPECT_THAT(sides("1:1", 512, 16), ElementsAre(512, 512));
  EXPECT_THAT(sides("2:1", 64, 8), ElementsAre(48, 88));      // no table of that base
  EXPECT_THAT(sides("2:1", 256, 64), ElementsAre(192, 384));  // none of the table's sides are such multiples
  for (const char* wrong : {"16", "16:", ":9", "16:0", "16x9", "a:b", "1:-1", "1:2:3", "5000:1"})
    EXPECT_ERROR(bucket_of_ratio(wrong, 512, 8), "such as 16:9") << wrong;
}

TEST(Buckets, SmallOnesJoinTheNearest) {
  const std::vector<Bucket> buckets = parse_buckets("64x64,48x96,96x48,56x80", 64, 8);
  EXPECT_THAT(merge_small_buckets(buckets, {10, 10, 10, 10}, 5), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(merge_small_buckets(buckets, {10, 10, 10, 2}, 5), ElementsAre(0, 1, 2, 1));
  EXPECT_THAT(merge_small_buckets(buckets, {1, 1, 1, 1}, 100)[0],
              testing::AnyOf(size_t{0}, size_t{1}, size_t{2}, size_t{3}));
  const std::vector<size_t> all = merge_small_buckets(buckets, {1, 2, 3, 4}, 100);
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [&](size_t target) { return target == all[0]; }));
  EXPECT_THAT(merge_small_buckets(buckets, {10, 0, 3, 0}, 5), ElementsAre(0, 1, 0, 3));  // empty ones stay
}

// No black edge and no stretched picture, whatever the sides.
TEST(CoverCrop, FillsTheBucketFromAnySize) {
  for (const auto& [height, width] :
       {std::pair{37, 91}, {91, 37}, {64, 64}, {3, 5}, {200, 201}, {33, 1000}}) {
    Image image{height, width, std::vector<uint8_t>(static_cast<size_t>(height * width * 3), 200)};
    for (const auto& [h, w] : {std::pair{48, 96}, {96, 48}, {64, 64}}) {
      const Image cropped = cover_crop(image, h, w);
      ASSERT_EQ(cropped.height, h);
      ASSERT_EQ(cropped.width, w);
      for (const uint8_t value : cropped.rgb) ASSERT_EQ(value, 200);
    }
  }
  // The centre stays the centre.
  Image half{10, 40, std::vector<uint8_t>(10 * 40 * 3, 0)};
  for (int64_t y = 0; y < 10; ++y) std::fill_n(half.rgb.begin() + (y * 40 + 20) * 3, 20 * 3, uint8_t{255});
  const Image square = cover_crop(half, 10, 10);
  EXPECT_EQ(square.rgb[0], 0);
  EXPECT_EQ(square.rgb[9 * 3], 255);
}

}  // namespace
}  // namespace kiln
