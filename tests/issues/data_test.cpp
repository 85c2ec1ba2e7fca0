// Defects of other trainers' data code that Kiln must not have: one test each.
#include <algorithm>
#include <set>

#include "core/philox.h"
#include "data/loader/batches.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::make_sample, test::small_info;

BatchOptions options_of(int64_t global_batch) {
  BatchOptions options;
  options.seed = 5;
  options.global_batch = global_batch;
  return options;
}

class DataIssues : public ::testing::Test {
 protected:
  // A store of so many samples.
  std::shared_ptr<FeatureStore> store(int64_t num_samples, const StoreInfo& info = small_info()) const {
    test::write_store(folder_ / "store", info, num_samples);
    return FeatureStore::open(folder_ / "store");
  }
  TempFolder folder_;
};

std::vector<int64_t> next_ids(BatchSource& source, int num_batches) {
  std::vector<int64_t> ids;
  for (int i = 0; i < num_batches; ++i) {
    const auto batch = source.next();
    ids.insert(ids.end(), batch->sample_ids.begin(), batch->sample_ids.end());
  }
  return ids;
}

// ai-toolkit#329: resume restarts the epoch's data, so its first samples are seen twice and its last never.
TEST_F(DataIssues, ResumeContinuesWithinTheEpoch) {
  const auto features = store(10);
  const auto uninterrupted = next_ids(*store_batches(features, options_of(2)), 5);
  auto ids = next_ids(*store_batches(features, options_of(2)), 2);
  const auto resumed = store_batches(features, options_of(2));
  resumed->seek(4);
  const auto rest = next_ids(*resumed, 3);
  ids.insert(ids.end(), rest.begin(), rest.end());
  EXPECT_EQ(ids, uninterrupted);
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()) - ids.begin(), 10);
}

// accelerate's skip_first_batches left in the loop: the batches skipped on resume are missing in every later
// epoch.
TEST_F(DataIssues, EpochsAfterAResumeAreWhole) {
  const auto resumed = store_batches(store(10), options_of(2));
  resumed->seek(6);
  next_ids(*resumed, 2);
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto ids = next_ids(*resumed, 5);
    EXPECT_EQ(std::set<int64_t>(ids.begin(), ids.end()).size(), 10u) << epoch;
  }
}

// DistributedSampler with drop_last: the samples beyond the last whole batch of an epoch are dropped.
TEST_F(DataIssues, TheEpochsTailIsNotDropped) {
  const auto ids = next_ids(*store_batches(store(10), options_of(4)), 5);
  for (int64_t sample = 0; sample < 10; ++sample)
    EXPECT_EQ(std::count(ids.begin(), ids.end(), sample), 2) << sample;
}

// fast-DiT: extraction freezes one posterior sample and one flip of each image for the whole training.
TEST_F(DataIssues, EveryEpochDrawsPosteriorAndFlipAfresh) {
  StoreInfo info = small_info();
  info.num_flips = 2;
  const auto source = store_batches(store(4, info), options_of(4));
  std::set<std::vector<float>> latents_of_sample_0;
  constexpr int kNumEpochs = 20;
  for (int epoch = 0; epoch < kNumEpochs; ++epoch) {
    const auto batch = source->next();
    const int64_t row =
        std::find(batch->sample_ids.begin(), batch->sample_ids.end(), 0) - batch->sample_ids.begin();
    const float* x = &batch->x_0[row * info.latent_size()];
    latents_of_sample_0.emplace(x, x + info.latent_size());
  }
  EXPECT_EQ(latents_of_sample_0.size(), static_cast<size_t>(kNumEpochs));
}

// PixArt and fast-DiT: each process names its files from 0 on and overwrites the others'. A second writer is
// refused.
TEST_F(DataIssues, WritersDoNotOverwriteEachOther) {
  const auto writer = FeatureStoreWriter::open(folder_ / "store", small_info());
  writer->add(make_sample(small_info(), 0));
  EXPECT_ERROR(FeatureStoreWriter::open(folder_ / "store", small_info()), "another process is writing");
}

// PixArt: files that exist are skipped without a look, also those of another autoencoder or resolution.
TEST_F(DataIssues, FeaturesOfOtherSettingsAreNotTakenForDone) {
  { FeatureStoreWriter::open(folder_ / "store", small_info())->add(make_sample(small_info(), 0)); }
  StoreInfo other = small_info();
  other.image_size = 80;
  EXPECT_ERROR(FeatureStoreWriter::open(folder_ / "store", other), "image_size (40 there, 80 asked for)");
}

// PixArt: names are cut at the first dot, so that "a.1.png" and "a.2.png" become one sample.
TEST_F(DataIssues, NamesAreKeptWhole) {
  const auto writer = FeatureStoreWriter::open(folder_ / "store", small_info());
  for (const char* name : {"a.1.png", "a.2.png", "a"}) {
    auto sample = make_sample(small_info(), 0);
    sample.name = name;
    writer->add(sample);
  }
  writer->finish();
  const auto store = FeatureStore::open(folder_ / "store");
  EXPECT_EQ(store->sample_name(0), "a.1.png");
  EXPECT_EQ(store->sample_name(1), "a.2.png");
  EXPECT_EQ(store->sample_name(2), "a");
}

// OneTrainer#526: one small file per image. sd-scripts#1413: a cache written in one precision is read in
// another.
TEST_F(DataIssues, FewFilesOfStatedPrecision) {
  StoreInfo info = small_info();
  info.dtype = Dtype::kF16;
  test::write_store(folder_ / "store", info, 500, /*samples_per_shard=*/4096);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "store"), {}), 2);
  EXPECT_EQ(FeatureStore::open(folder_ / "store")->info().dtype, Dtype::kF16);
}

// Samples of other ranks or another rank count draw other noise: a changed number of GPUs changes the
// training.
TEST_F(DataIssues, AnotherNumberOfRanksSeesTheSameDraws) {
  const auto features = store(10);
  const auto whole = store_batches(features, options_of(6))->next();
  for (int64_t rank = 0; rank < 3; ++rank) {
    BatchOptions options = options_of(6);
    options.rank = rank;
    options.world_size = 3;
    const auto part = store_batches(features, options)->next();
    const int64_t begin = rank * 2 * small_info().latent_size();
    EXPECT_TRUE(std::equal(part->noise.begin(), part->noise.end(), whole->noise.begin() + begin));
    EXPECT_TRUE(std::equal(part->x_0.begin(), part->x_0.end(), whole->x_0.begin() + begin));
  }
}

}  // namespace
}  // namespace kiln
