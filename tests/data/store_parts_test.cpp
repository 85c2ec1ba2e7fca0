// Stores that several ranks make together.
#include "data/store/store_parts.h"

#include "data/test_store.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRanks = 3;

// Samples [first, last) as a rank's store. `finished`: false leaves it as a killed rank does.
void write_part(const std::string& out, int64_t rank, int64_t first, int64_t last, bool finished = true) {
  const StoreInfo info = test::small_info();
  const auto writer = FeatureStoreWriter::open(store_part_folder(out, rank, kRanks), info, 4);
  for (int64_t i = first; i < last; ++i) writer->add(test::make_sample(info, i));
  if (finished && last > first) writer->finish();
}

void expect_whole(const std::string& out, int64_t num_samples) {
  EXPECT_THAT(find_store_problems(out), IsEmpty());
  const auto store = FeatureStore::open(out, /*verify=*/true);
  ASSERT_EQ(store->size(), num_samples);
  std::vector<float> mean(static_cast<size_t>(store->info().latent_size()));
  for (int64_t i = 0; i < num_samples; ++i) {
    EXPECT_EQ(store->sample_name(i), test::make_sample(store->info(), i).name);
    store->read_mean(std::span(&i, 1), {}, mean);
    EXPECT_EQ(mean[7], test::mean_value(i, 7));
  }
  for (const auto& entry : fs::directory_iterator(out)) EXPECT_FALSE(entry.is_directory()) << entry.path();
}

TEST(StoreParts, JoinInTheOrderOfRanks) {
  const test::TempFolder folder;
  const std::string out = folder / "store";
  EXPECT_FALSE(prepare_store_parts(out, kRanks));
  write_part(out, 2, 9, 11);
  write_part(out, 0, 0, 9);  // rank 1 has no work
  EXPECT_EQ(join_store_parts(out, kRanks, test::small_info()), 11);
  expect_whole(out, 11);
  EXPECT_TRUE(prepare_store_parts(out, kRanks));
  EXPECT_TRUE(prepare_store_parts(out, 5));
}

TEST(StoreParts, AnInterruptedJoinIsDoneAgain) {
  const test::TempFolder folder;
  const std::string out = folder / "store";
  write_part(out, 0, 0, 6);
  write_part(out, 1, 6, 12);
  fs::create_hard_link(store_part_folder(out, 0, kRanks) + "/shard-00000.safetensors",
                       out + "/shard-00000.safetensors");
  test::write_bytes(out + "/shard-00001.safetensors", "torn");  // a copy that was killed
  EXPECT_FALSE(prepare_store_parts(out, kRanks));
  EXPECT_EQ(join_store_parts(out, kRanks, test::small_info()), 12);
  expect_whole(out, 12);
}

// Where a part lies on another disk, as a link to it shows, its shards get no second name.
TEST(StoreParts, Finding21ACopyIsWholeBeforeItsPartGoes) {
  const fs::path other_disk = fs::path("/dev/shm") / fmt::format("kiln-parts-{}", ::getpid());
  std::error_code none;
  if (!fs::create_directory(other_disk, none)) GTEST_SKIP() << "there is no other disk";
  const test::TempFolder folder;
  const std::string out = folder / "store", part = store_part_folder(out, 0, kRanks);
  fs::create_directories(out);
  fs::create_directory_symlink(other_disk, part);
  write_part(out, 0, 0, 6);
  EXPECT_EQ(join_store_parts(out, kRanks, test::small_info()), 6);
  expect_whole(out, 6);
  fs::remove_all(other_disk);
}

TEST(StoreParts, WhatIsLeftOfPartsGoesAway) {
  const test::TempFolder folder;
  const std::string out = folder / "store";
  test::write_store(out, test::small_info(), 5);
  write_part(out, 1, 5, 7);  // killed between store.json and the removal
  EXPECT_TRUE(prepare_store_parts(out, kRanks));
  expect_whole(out, 5);
}

TEST(StoreParts, RefusesWhatOthersBegan) {
  const test::TempFolder folder;
  write_part(folder / "parts", 0, 0, 6, /*finished=*/false);
  EXPECT_ERROR(prepare_store_parts(folder / "parts", 2), "another number of ranks");
  EXPECT_FALSE(prepare_store_parts(folder / "parts", kRanks));
  test::add_samples(*FeatureStoreWriter::open(folder / "alone", test::small_info()), test::small_info(), 2);
  EXPECT_ERROR(prepare_store_parts(folder / "alone", kRanks), "begun by one process");
  fs::create_directories(folder / "other/photos");
  EXPECT_ERROR(prepare_store_parts(folder / "other", kRanks), "\"photos\"");
  fs::create_directories(folder / "empty");
  EXPECT_ERROR(join_store_parts(folder / "empty", kRanks, test::small_info()), "at least one sample");
}

}  // namespace
}  // namespace kiln
