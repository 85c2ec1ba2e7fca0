// Extraction to buckets: lanes, sizes, ranks.

#include "data/store/feature_store.h"
#include "data/test_images.h"
#include "extract/extract.h"
#include "parallel/rank_threads.h"

namespace kiln {
namespace {

using test::make_picture;

// Pictures of three shapes in turn, one of them broken behind its header, one too small.
void write_pictures(const TempFolder& folder) {
  const std::pair<int64_t, int64_t> sizes[] = {{20, 22}, {16, 40}, {50, 24}};
  for (int64_t i = 0; i < 20; ++i) {
    const auto [height, width] = sizes[i % 3];
    const std::string path = folder / fmt::format("images/{:02}.png", i);
    test::write_picture(path, make_picture(height + i % 2, width, static_cast<uint32_t>(i)));
    if (i == 4) std::filesystem::resize_file(path, 100);
  }
  test::write_picture(folder / "images/20.png", make_picture(10, 10));
}

ExtractOptions options_of(const TempFolder& folder) {
  ExtractOptions options;
  options.data = folder / "images";
  options.autoencoder = "pixels";
  options.out = folder / "store";
  options.buckets = "16x16,8x24,32x16,8x80";
  options.device = "cpu";
  options.batch = 2;
  options.shard_size = 3;
  return options;
}

std::shared_ptr<FeatureStore> extract_alone(const ExtractOptions& options) {
  ProcessGroup alone;
  extract(options, alone);
  return FeatureStore::open(options.out, /*verify=*/true);
}

std::shared_ptr<FeatureStore> extract_on_ranks(int64_t num_ranks, const ExtractOptions& options) {
  test::on_ranks(num_ranks, [&](const std::shared_ptr<ProcessGroup>& group) { extract(options, *group); });
  return FeatureStore::open(options.out, /*verify=*/true);
}

TEST(BucketExtraction, MakesALanePerBucketAndKeepsTheOriginalSizes) {
  const TempFolder folder;
  write_pictures(folder);
  const auto store = extract_alone(options_of(folder));
  const StoreInfo& info = store->info();
  EXPECT_THAT(info.lanes, ElementsAre(Lane{.height = 16, .width = 16, .aspect_ratio = 1},
                                      Lane{.height = 8, .width = 24, .aspect_ratio = 0.33},
                                      Lane{.height = 32, .width = 16, .aspect_ratio = 2}));
  EXPECT_TRUE(info.has_image_size);
  EXPECT_EQ(info.num_samples, 19);
  EXPECT_EQ(info.image_size, 20);  // the root of the mean of 256, 192, 512 and 640
  EXPECT_EQ(info.source["buckets"], "16x16,8x24,32x16,8x80");
  std::vector<int64_t> counts;
  for (const SampleLane& lane : info.sample_lanes()) counts.push_back(lane.size());
  EXPECT_THAT(counts, ElementsAre(7, 6, 6));
  for (int64_t id = 0; id < store->size(); ++id) {
    const auto dataset = ImageDataset::open(folder / "images");
    const Image image = read_image(folder / "images/" + store->sample_name(id));
    EXPECT_THAT(store->image_hw(id), ElementsAre(image.height, image.width));
    const Lane& lane = info.lanes[store->lane(id)];
    const Image expected = cover_crop(image, lane.height, lane.width);
    std::vector<float> pixels(3 * lane.area());
    store->read_mean({&id, 1}, {}, pixels);
    for (int64_t i = 0; i < lane.area(); ++i)
      for (int64_t c = 0; c < 3; ++c)
        ASSERT_NEAR((pixels[c * lane.area() + i] + 1) * 127.5, expected.rgb[3 * i + c], 1e-3);
  }
}

TEST(BucketExtraction, RanksMakeTheSameSamples) {
  const TempFolder folder;
  write_pictures(folder);
  ExtractOptions options = options_of(folder);
  const auto alone = extract_alone(options);
  options.out = folder / "together";
  const auto together = extract_on_ranks(3, options);
  EXPECT_EQ(together->info().lanes, alone->info().lanes);
  ASSERT_EQ(together->size(), alone->size());
  for (int64_t id = 0; id < alone->size(); ++id) {
    ASSERT_EQ(together->sample_name(id), alone->sample_name(id));
    ASSERT_EQ(together->lane(id), alone->lane(id));
    ASSERT_EQ(together->image_hw(id), alone->image_hw(id));
    std::vector<float> a(3 * alone->info().lanes[alone->lane(id)].area()), b(a.size());
    alone->read_mean({&id, 1}, {}, a);
    together->read_mean({&id, 1}, {}, b);
    ASSERT_EQ(a, b) << id;
  }
  // Both say that there is nothing to do, although a bucket is left out.
  extract_alone(options);
  extract_on_ranks(3, options);
}

// A bucket all of whose pictures turn out to be broken is no lane that batches would be made of.
TEST(BucketExtraction, ALaneWithoutWholePicturesIsLeftOut) {
  const TempFolder folder;
  write_pictures(folder);
  for (int64_t i = 0; i < 20; i += 3)
    std::filesystem::resize_file(folder / fmt::format("images/{:02}.png", i), 100);
  for (const int64_t num_ranks : {1, 2}) {
    ExtractOptions options = options_of(folder);
    options.out = folder / fmt::format("store-{}", num_ranks);
    extract_on_ranks(num_ranks, options);
    const auto store = extract_on_ranks(num_ranks, options);
    EXPECT_EQ(store->info().lanes.size(), 2u);
    EXPECT_EQ(store->size(), 12);
    EXPECT_EQ(store->lane(0), 0);
    EXPECT_EQ(store->lane(11), 1);
    options.bucket_min = 2;
    EXPECT_ERROR(extract_alone(options), "source bucket_min (1 there, 2 asked for)");
  }
}

TEST(BucketExtraction, OtherSizesOfThePicturesAreOtherPictures) {
  const TempFolder folder;
  write_pictures(folder);
  extract_alone(options_of(folder));
  test::write_picture(folder / "images/00.png", make_picture(30, 31));
  EXPECT_ERROR(extract_alone(options_of(folder)), "source buckets_xxh3");
}

TEST(BucketExtraction, ImpossibleTablesAreOneLine) {
  const TempFolder folder;
  write_pictures(folder);
  ExtractOptions options = options_of(folder);
  options.buckets = "pixart";
  EXPECT_ERROR(extract_alone(options), "not 0: give sizes");
  options.image_size = 300;
  EXPECT_ERROR(extract_alone(options), "not 300: give sizes");
  options.image_size = 256;
  EXPECT_ERROR(extract_alone(options), "smaller than their bucket (--enlarge");
  options.buckets = "sdxl";
  EXPECT_ERROR(extract_alone(options), "expected --buckets to be \"pixart\" or sizes");
  options.image_size = 0;
  options.buckets = "9000000000x16";
  EXPECT_ERROR(extract_alone(options), "expected at most 268435456 pixels, got 9000000000x16");
  options = options_of(folder);
  options.bucket_min = 21;
  EXPECT_ERROR(extract_alone(options), "--bucket-min 21 is more than the 20 pictures");
  options.bucket_min = 0;
  EXPECT_ERROR(extract_alone(options), "--bucket-min: expected 1 or more");
  options.bucket_min = 2;
  options.buckets.clear();
  EXPECT_ERROR(extract_alone(options), "--bucket-min 2 has no effect without --buckets");
  options = options_of(folder);
  options.strict = true;
  EXPECT_ERROR(extract_alone(options), "20.png is too small: 10 x 10");
  options.exif_orientation = "no";
  EXPECT_ERROR(extract_alone(options), "--exif-orientation: expected apply or ignore, got no");
  EXPECT_FALSE(std::filesystem::exists(folder / "store"));
}

}  // namespace
}  // namespace kiln
