// Defects of peers' extraction.
#include "extract/extract.h"

#include "data/store/feature_store.h"
#include "data/test_images.h"
#include "parallel/rank_threads.h"

namespace kiln {
namespace {

using testing::UnorderedElementsAreArray;

constexpr int64_t kSide = 16;

ExtractOptions options_of(const test::TempFolder& folder) {
  ExtractOptions options;
  options.data = folder / "images";
  options.autoencoder = "pixels";
  options.out = folder / "store";
  options.image_size = kSide;
  options.device = "cpu";
  return options;
}

std::vector<std::string> names_in(const std::string& store_folder) {
  const auto store = FeatureStore::open(store_folder);
  std::vector<std::string> names;
  for (int64_t id = 0; id < store->info().num_samples; ++id) names.push_back(store->sample_name(id));
  return names;
}

// Extracts folder/images on one rank.
std::vector<std::string> extracted_names(const test::TempFolder& folder) {
  ProcessGroup alone;
  extract(options_of(folder), alone);
  return names_in(folder / "store");
}

// A peer squashed pictures into the square when extracting, and cropped them when training without.
TEST(ExtractIssues, PicturesAreCroppedNotSquashed) {
  const test::TempFolder folder;
  Image wide{16, 48, std::vector<uint8_t>(16 * 48 * 3, 255)};
  for (int64_t y = 0; y < 16; ++y) std::fill_n(wide.rgb.begin() + (y * 48 + 16) * 3, 16 * 3, uint8_t{0});
  test::write_picture(folder / "images/wide.png", wide);
  extracted_names(folder);
  std::vector<float> pixels(3 * kSide * kSide);
  const std::vector<int64_t> ids = {0};
  FeatureStore::open(folder / "store")->read_mean(ids, {}, pixels);
  EXPECT_THAT(pixels, testing::Each(-1.0f));
}

// fast-DiT, PixArt: every rank counts its files from 0 on, and they overwrite each other.
TEST(ExtractIssues, RanksDoNotOverwriteEachOther) {
  const test::TempFolder folder;
  std::vector<std::string> names;
  for (uint32_t i = 0; i < 11; ++i) {
    names.push_back(fmt::format("class-{}/{}.png", i % 3, i));
    test::write_picture(folder / "images/" + names.back(), test::make_picture(kSide, kSide, i));
  }
  ExtractOptions options = options_of(folder);
  options.batch = 2;
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) { extract(options, *group); });
  EXPECT_THAT(names_in(options.out), UnorderedElementsAreArray(names));
  // Each with its own picture: those of a single rank.
  options.out = folder / "alone";
  ProcessGroup alone;
  extract(options, alone);
  const auto together = FeatureStore::open(folder / "store"), single = FeatureStore::open(options.out);
  std::vector<float> a(3 * kSide * kSide), b(a.size());
  for (int64_t id = 0; id < 11; ++id) {
    ASSERT_EQ(together->sample_name(id), single->sample_name(id));
    together->read_mean(std::vector<int64_t>{id}, {}, a);
    single->read_mean(std::vector<int64_t>{id}, {}, b);
    EXPECT_EQ(a, b) << id;
  }
}

// PixArt: names are cut at the first dot, so that a.1.png and a.2.png become one sample.
class DottedNames : public testing::Test {
 protected:
  const test::TempFolder folder;
  static std::string png(uint32_t seed) {
    return test::text_of(encode_png(test::make_picture(kSide, kSide, seed)));
  }
};

TEST_F(DottedNames, OfClassFolders) {
  for (const char* name : {"images/c.d/a.1.png", "images/c.d/a.2.png", "images/c.e/a.1.png"})
    test::write_file(folder / name, png(1));
  EXPECT_THAT(extracted_names(folder),
              UnorderedElementsAreArray({"c.d/a.1.png", "c.d/a.2.png", "c.e/a.1.png"}));
}

TEST_F(DottedNames, OfMetadata) {
  for (const char* name : {"images/a.1.png", "images/a.2.png"}) test::write_file(folder / name, png(1));
  test::write_file(folder / "images/metadata.jsonl",
                   "{\"file_name\": \"a.1.png\", \"text\": \"one\"}\n"
                   "{\"file_name\": \"a.2.png\", \"text\": \"two\"}\n");
  EXPECT_THAT(extracted_names(folder), UnorderedElementsAreArray({"a.1.png", "a.2.png"}));
}

// WebDataset itself takes names that are equal up to the first dot for one sample: two pictures in it are
// refused, not made one. Dots in front of the base name are no such ends.
TEST_F(DottedNames, OfArchives) {
  std::filesystem::create_directories(folder / "images");
  const std::string tar = folder / "images/0.tar";
  test::write_tar(tar, {{"a.1.png", png(1)}, {"a.2.png", png(2)}});
  EXPECT_ERROR(extracted_names(folder), "a.1.png and a.2.png");
  EXPECT_FALSE(std::filesystem::exists(folder / "store"));
  test::write_tar(tar, {{"v.1/a.png", png(1)}, {"v.2/a.png", png(2)}});
  EXPECT_THAT(extracted_names(folder), UnorderedElementsAreArray({"0.tar/v.1/a.png", "0.tar/v.2/a.png"}));
}

}  // namespace
}  // namespace kiln
