// Stores of several lanes, with the sizes of the original pictures.

#include "data/store/store_parts.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::small_info;

StoreInfo lanes_info() {
  StoreInfo info = small_info();
  info.lanes = {{.height = 3, .width = 5, .aspect_ratio = 0.6},
                {.height = 2, .width = 7, .aspect_ratio = 0.29},
                {.height = 5, .width = 3, .aspect_ratio = 1.67}};
  info.has_image_size = true;
  return info;
}

FeatureStoreWriter::Sample sample_of(const StoreInfo& info, int64_t index, int64_t lane) {
  FeatureStoreWriter::Sample sample = test::make_sample(info, index);
  sample.lane = lane;
  sample.mean.assign(info.latent_size(lane), static_cast<float>(index));
  sample.logvar.assign(info.latent_size(lane), -1);
  sample.image_hw = {100 + index, 200 + index};
  return sample;
}

void expect_samples(const std::string& folder, const std::vector<int64_t>& lanes) {
  const auto store = FeatureStore::open(folder, /*verify=*/true);
  ASSERT_EQ(store->size(), static_cast<int64_t>(lanes.size()));
  for (int64_t id = 0; id < store->size(); ++id) {
    EXPECT_EQ(store->lane(id), lanes[id]);
    EXPECT_THAT(store->image_hw(id), ElementsAre(100 + id, 200 + id));
    std::vector<float> mean(store->info().latent_size(lanes[id]));
    store->read_mean({&id, 1}, {}, mean);
    EXPECT_THAT(mean, testing::Each(static_cast<float>(id)));
  }
}

TEST(StoreLanes, KeepRatiosAndSizes) {
  const TempFolder folder;
  const StoreInfo info = lanes_info();
  const std::vector<int64_t> lanes = {0, 0, 0, 1, 1, 2};
  {
    const auto writer = FeatureStoreWriter::open(folder / "store", info, 2);
    for (int64_t i = 0; i < 5; ++i) writer->add(sample_of(info, i, lanes[i]));
  }
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 2);
  EXPECT_EQ(writer->num_complete(), 5);
  EXPECT_EQ(writer->num_complete_of(0), 3);
  EXPECT_EQ(writer->num_complete_of(1), 2);
  EXPECT_EQ(writer->num_complete_of(2), 0);
  writer->add(sample_of(info, 5, 2));
  writer->finish();
  expect_samples(folder / "store", lanes);
  const auto store = FeatureStore::open(folder / "store");
  EXPECT_EQ(store->info().lanes, info.lanes);
  EXPECT_TRUE(store->info().has_image_size);
}

TEST(StoreLanes, WithoutSamplesAreDropped) {
  const TempFolder folder;
  const StoreInfo info = lanes_info();
  for (int run = 0; run < 2; ++run) {  // the second finds the store complete
    const auto writer = FeatureStoreWriter::open(folder / "store", info);
    EXPECT_EQ(writer->num_complete_of(0), 2 * run);
    EXPECT_EQ(writer->num_complete_of(1), 0);
    EXPECT_EQ(writer->num_complete_of(2), 2 * run);
    for (int64_t i = writer->num_complete(); i < 4; ++i) writer->add(sample_of(info, i, i < 2 ? 0 : 2));
    writer->finish();
  }
  expect_samples(folder / "store", {0, 0, 1, 1});
  EXPECT_THAT(FeatureStore::open(folder / "store")->info().lanes, ElementsAre(info.lanes[0], info.lanes[2]));
  StoreInfo other = info;
  other.lanes[2].aspect_ratio = 1.7;
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", other), "lanes (");
}

TEST(StoreLanes, OfPartsBecomeThoseOfTheStore) {
  const TempFolder folder;
  const StoreInfo info = lanes_info();
  const std::string out = folder / "store";
  const std::vector<std::vector<int64_t>> of_ranks = {{0, 0}, {0, 2}, {2}};
  int64_t index = 0;
  for (int64_t rank = 0; rank < 3; ++rank) {
    const auto writer = FeatureStoreWriter::open(store_part_folder(out, rank, 3), info);
    for (const int64_t lane : of_ranks[rank]) writer->add(sample_of(info, index++, lane));
    writer->finish();
  }
  EXPECT_EQ(join_store_parts(out, 3, info), 5);
  expect_samples(out, {0, 0, 0, 1, 1});
}

TEST(StoreLanes, SizesThatAreMissingAreNamed) {
  const TempFolder folder;
  StoreInfo info = small_info();
  test::write_store(folder / "store", info, 3);
  auto root = nlohmann::json::parse(test::read_bytes(folder / "store/store.json"));
  EXPECT_FALSE(root.contains("has_image_size"));
  EXPECT_FALSE(root["lanes"][0].contains("aspect_ratio"));
  root["has_image_size"] = true;
  test::write_bytes(folder / "store/store.json", root.dump());
  EXPECT_ERROR(FeatureStore::open(folder / "store"),
               "expected the size of the original picture of sample \"folder/image.0.v2.png\", got 0 x 0");
}

}  // namespace
}  // namespace kiln
