// What --data is follows from its path alone; a description of it loads nothing.
#include "train/dataset/data_description.h"

#include "data/test_store.h"
#include "train/settings.h"
#include "train/setup.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using test::small_info, test::write_store;

DataSource source_at(const std::string& path, const std::string& autoencoder = "") {
  DataOptions options;
  options.path = path;
  options.autoencoder = autoencoder;
  return source_of(options);
}

bool is_synthetic(const DataSource& source) { return std::holds_alternative<SyntheticData>(source); }
bool is_stored(const DataSource& source) { return std::holds_alternative<StoredData>(source); }

TEST(DataSource, IsToldByItsPath) {
  const TempFolder folder;
  write_store(folder / "store", small_info(), 3);
  const std::string pictures = folder.path().string();
  EXPECT_TRUE(is_synthetic(source_at("synthetic", "pixels")));
  EXPECT_TRUE(is_stored(source_at(folder / "store", "vae")));
  for (const char* autoencoder : {"", "pixels", "vae"}) {
    EXPECT_TRUE(reads_pictures(source_at(pictures, autoencoder))) << autoencoder;
    EXPECT_TRUE(reads_pictures(source_at(folder / "nothing", autoencoder))) << autoencoder;
  }
  EXPECT_FALSE(encodes_pictures(source_at(pictures, "pixels")));
  EXPECT_TRUE(encodes_pictures(source_at(pictures, "vae")));
}

TEST(DataSource, WithoutAPathIsAPlans) {
  const TempFolder folder;
  write_store(folder.path().string(), small_info(), 3);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());  // the store is no more its data than any other folder
  EXPECT_TRUE(is_synthetic(source_at("")));
  EXPECT_TRUE(is_synthetic(source_at("", "pixels")));
  EXPECT_TRUE(encodes_pictures(source_at("", "vae")));
  std::filesystem::current_path(before);
}

TEST(DataSource, IsRefusedWhereItDoesNotFit) {
  const TempFolder folder;
  write_store(folder / "store", small_info(), 3);
  DataOptions options;
  options.path = folder / "nothing";
  EXPECT_ERROR(require_here(source_of(options)), "does not exist");
  options.path = folder.path().string();
  EXPECT_ERROR(require_here(source_of(options)), "encode while training with --autoencoder");
  options.autoencoder = "pixels";
  EXPECT_NO_THROW(require_here(source_of(options)));
  options.more = {folder / "store"};
  EXPECT_ERROR(require_here(source_of(options)), "--more-data needs feature stores");
  options.path = "synthetic";
  EXPECT_ERROR(require_here(source_of(options)), "--more-data has no effect");
  options.autoencoder = "vae";
  EXPECT_ERROR(require_here(source_of(options)), "expects pixels or nothing");
  options.path = folder / "store";
  EXPECT_NO_THROW(require_here(source_of(options)));
  options.more = {folder.path().string()};
  EXPECT_ERROR(require_here(source_of(options)), "is not a feature store");
}

TEST(DataSource, IsHeldOutOfTheDataOrBesideThem) {
  DataOptions data;
  data.path = "store";
  data.more = {"further"};
  data.weights = {1, 2};
  data.parts = {1, 1};
  ValidationOptions validation;
  validation.share = 0.1;
  const DataOptions shared = held_out_options(data, validation);
  EXPECT_EQ(shared.path, "store");
  EXPECT_EQ(shared.more, data.more);
  EXPECT_EQ(shared.parts, data.parts);
  EXPECT_TRUE(shared.weights.empty()) << "each once";
  validation = {.data = "other"};
  const DataOptions other = held_out_options(data, validation);
  EXPECT_EQ(other.path, "other");
  EXPECT_TRUE(other.more.empty() && other.parts.empty() && other.weights.empty());
}

TEST(DataDescription, OfAStoreHasItsClassesAndNoDecoder) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.channels = 4;
  info.lanes = {{.height = 8, .width = 8}};
  info.image_size = 64;
  write_store(folder / "store", info, 3);
  TrainOptions options = test::tiny_dit_options();
  options.data.path = folder / "store";
  const DataDescription data = describe(options);
  EXPECT_EQ(data.class_names, info.class_names);
  EXPECT_EQ(data.shape.num_classes, 5) << "--num-classes";
  EXPECT_EQ(data.shape.lanes, info.lanes);
  EXPECT_EQ(data.info.num_samples, 3);
  EXPECT_FALSE(data.autoencoder || data.text || data.pictures.images);
  options.samples.every = 1;
  options.data.autoencoder = "an autoencoder";
  ASSERT_TRUE(describe(options).autoencoder);
  EXPECT_EQ(describe(options).autoencoder->assumed, "KL-f8's");
}

// A plan in buckets is for Sana's autoencoder in every bucket, also in those that are longer than their name.
TEST(DataDescription, AssumesOneAutoencoderForAllBuckets) {
  const DataDescription data =
      describe(changed({},
                       "model=Sana-600M-512 objective=flow autoencoder=dc-ae image-size=512 "
                       "buckets=512x512,256x1024,1024x256"));
  EXPECT_EQ(data.shape.lanes.size(), 3u);
  ASSERT_TRUE(data.autoencoder);
  EXPECT_EQ(data.autoencoder->assumed, "Sana's DC-AE f32c32");
}

}  // namespace
}  // namespace kiln
