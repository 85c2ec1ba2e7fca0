// Stores that have grown, and several of them as one.
#include "data/store/store_source.h"

#include "data/loader/batches.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::small_info, test::write_store;

// A store of 6 samples that has grown by 3 and by 2.
void write_grown(const std::string& folder) {
  write_store(folder, small_info(), 6);
  write_store(appended_part_folder(folder, 1), small_info(), 3);
  write_store(appended_part_folder(folder, 2), small_info(), 2);
}

std::vector<float> mean_of(const FeatureStore& store, int64_t id) {
  std::vector<float> mean(static_cast<size_t>(store.info().latent_size(store.lane(id))));
  store.read_mean({&id, 1}, {}, mean);
  return mean;
}

TEST(StoreSource, PartsFollowEachOther) {
  const TempFolder folder;
  write_grown(folder / "store");
  const StoreSource all{.store = folder / "store"}, first{.store = folder / "store", .num_parts = 2};
  const auto store = open_sources({&all, 1});
  ASSERT_EQ(store->size(), 11);
  EXPECT_EQ(open_sources({&first, 1})->size(), 9);
  EXPECT_EQ(samples_per_epoch({&all, 1}), 11);
  EXPECT_EQ(read_sources_info({&all, 1}).num_samples, 11);
  EXPECT_TRUE(store->sources().empty());
  const std::vector<int64_t> there = {0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1};
  for (int64_t id = 0; id < 11; ++id) {
    EXPECT_EQ(mean_of(*store, id)[3], test::mean_value(there[id], 3));
    EXPECT_EQ(store->label(id), there[id] % 3);
    EXPECT_THAT(store->sample_name(id), HasSubstr(fmt::format("image.{}.", there[id])));
  }
  EXPECT_ERROR(store->label(11), "from 0 to 10");
}

TEST(StoreSource, AWeightHasNoEffectOnASingleOne) {
  const TempFolder folder;
  write_grown(folder / "store");
  const StoreSource weighted{.store = folder / "store", .weight = 3};
  EXPECT_EQ(samples_per_epoch({&weighted, 1}), 11);
  const auto store = open_sources({&weighted, 1});
  for (const SampleLane& lane : store->sample_lanes()) EXPECT_EQ(lane.size(), 11);
}

TEST(StoreSource, WhatIsUnfinishedDoesNotCount) {
  const TempFolder folder;
  write_grown(folder / "store");
  const auto writer = FeatureStoreWriter::open(appended_part_folder(folder / "store", 3), small_info());
  test::add_samples(*writer, small_info(), 4);
  EXPECT_EQ(store_parts(folder / "store").size(), 3u);
  const StoreSource missing{.store = folder / "store", .num_parts = 4};
  EXPECT_ERROR(open_sources({&missing, 1}), "has 3 parts, 4 were trained on");
}

TEST(StoreSource, WeightsAndLanesOfSeveral) {
  const TempFolder folder;
  write_grown(folder / "a");
  StoreInfo wide = small_info();
  wide.lanes = {{.height = 2, .width = 8}, {.height = 3, .width = 5}};
  {
    const auto writer = FeatureStoreWriter::open(folder / "b", wide, 4);
    for (int64_t i = 0; i < 8; ++i) {
      FeatureStoreWriter::Sample sample = test::make_sample(wide, i);
      sample.lane = i / 5;
      sample.mean.assign(static_cast<size_t>(wide.latent_size(sample.lane)), static_cast<float>(i));
      sample.logvar.assign(sample.mean.size(), -1);
      writer->add(sample);
    }
    writer->finish();
  }
  const StoreSource sources[] = {{.store = folder / "a"}, {.store = folder / "b", .weight = 2}};
  const auto store = open_sources(sources);
  ASSERT_EQ(store->size(), 19);
  EXPECT_EQ(store->info().lanes.size(), 2u);
  EXPECT_EQ(store->lane(0), 0);
  EXPECT_EQ(store->lane(11), 1);  // 2 x 8
  EXPECT_EQ(store->lane(18), 0);
  EXPECT_EQ(samples_per_epoch(sources), 11 + 2 * 8);
  const std::vector<SampleSource> parts = store->sources();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].first, 11);
  EXPECT_EQ(parts[1].count, 8);
  std::vector<int64_t> sizes;
  for (const SampleLane& lane : store->sample_lanes()) sizes.push_back(lane.size());
  EXPECT_THAT(sizes, ElementsAre(11 + 2 * 3, 2 * 5));
  // Every batch of the loader is of one lane, and holds the samples that the order names.
  const auto batches = store_batches(store, {.seed = 1, .global_batch = 3});
  for (int64_t b = 0; b < 12; ++b) {
    const auto batch = batches->next();
    for (int64_t row = 0; row < 3; ++row) {
      const int64_t id = batch->sample_ids[static_cast<size_t>(row)];
      EXPECT_EQ(id, batches->order().sample_at(3 * b + row));
      EXPECT_EQ(store->info().lanes[static_cast<size_t>(store->lane(id))], batch->shape.lane);
    }
  }
}

TEST(StoreSource, RefusesWhatDoesNotFit) {
  const TempFolder folder;
  write_store(folder / "a", small_info(), 3);
  const auto refusal = [&](const char* name, const std::function<void(StoreInfo&)>& change) {
    StoreInfo info = small_info();
    change(info);
    write_store(folder / name, info, 3);
    const StoreSource sources[] = {{.store = folder / "a"}, {.store = folder / name}};
    return message_of([&] { open_sources(sources); });
  };
  EXPECT_THAT(refusal("b", [](StoreInfo& info) { info.autoencoder_fingerprint = "fedcba9876543210"; }),
              HasSubstr("latents of the autoencoder autoencoder_kl fedcba9876543210"));
  EXPECT_THAT(refusal("c", [](StoreInfo& info) { info.image_size = 48; }), HasSubstr("pictures of size 48"));
  EXPECT_THAT(refusal("d", [](StoreInfo& info) { info.num_flips = 2; }), HasSubstr("--flip both"));
  EXPECT_THAT(refusal("e",
                      [](StoreInfo& info) {
                        info.class_names = {"a", "b", "c"};
                      }),
              HasSubstr("classes of other names"));
}

}  // namespace
}  // namespace kiln
