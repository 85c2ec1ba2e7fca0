// Defects of peers' extraction.
#include "extract/extract.h"

#include "data/feature_store.h"
#include "data/test_images.h"

namespace kiln {
namespace {

// A peer squashed pictures into the square when extracting, and cropped them when training without.
TEST(ExtractIssues, PicturesAreCroppedNotSquashed) {
  const test::TempFolder folder;
  Image wide{16, 48, std::vector<uint8_t>(16 * 48 * 3, 255)};
  for (int64_t y = 0; y < 16; ++y) std::fill_n(wide.rgb.begin() + (y * 48 + 16) * 3, 16 * 3, uint8_t{0});
  test::write_picture(folder / "images/wide.png", wide);
  ExtractOptions options;
  options.data = folder / "images";
  options.autoencoder = "pixels";
  options.out = folder / "store";
  options.image_size = 16;
  options.device = "cpu";
  ProcessGroup alone;
  extract(options, alone);
  std::vector<float> pixels(3 * 16 * 16);
  const std::vector<int64_t> ids = {0};
  FeatureStore::open(options.out)->read_mean(ids, {}, pixels);
  EXPECT_THAT(pixels, testing::Each(-1.0f));
}

}  // namespace
}  // namespace kiln
