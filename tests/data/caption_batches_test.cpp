// Captions in batches: which one a position has, dropped ones, and the same draws whatever the batch and
// ranks.

#include <cstring>
#include <set>

#include "data/loader/batches.h"
#include "data/test_store.h"
#include "data/text_store/text_store_writer.h"

namespace kiln {
namespace {

using test::small_info;

constexpr int64_t kSamples = 12, kCaptionWidth = 3;

// Sample i has the captions "i short" and "i long", the second three times as often; sample 0 has none.
CaptionTable caption_table() {
  CaptionTable table;
  table.add_sample("0.png", {});
  for (int64_t i = 1; i < kSamples; ++i)
    table.add_sample(fmt::format("{}.png", i),
                     std::vector<Caption>{{.text = fmt::format("{} short", i)},
                                          {.text = fmt::format("{} long", i), .weight = 3}});
  return table;
}

// Entry e has 1 + e % 3 rows, which hold e in their first number.
std::shared_ptr<const TextStore> write_text(const std::string& folder) {
  const CaptionTable table = caption_table();
  TextStoreWriter writer(folder, test::small_text_info(kCaptionWidth, 3, 7), table);
  for (int64_t shard = 0; shard < writer.info().num_shards(); ++shard) {
    const EntryRange range = shard_entries(writer.info(), shard);
    std::vector<int64_t> rows;
    std::vector<float> features;
    for (int64_t entry = range.first; entry < range.first + range.count; ++entry) {
      rows.push_back(1 + entry % 3);
      features.insert(features.end(), rows.back() * kCaptionWidth, static_cast<float>(entry));
    }
    writer.write_shard(shard, rows, std::as_bytes(std::span(features)), 0);
  }
  writer.finish(table);
  return TextStore::open(folder);
}

// The caption of one row of a batch.
struct CaptionRow {
  int64_t sample = 0;
  bool dropped = false;
  std::vector<float> rows{};
  friend bool operator==(const CaptionRow&, const CaptionRow&) = default;
  int64_t entry() const { return static_cast<int64_t>(rows.front()); }
};

std::vector<CaptionRow> captions_of(const Batch& batch) {
  std::vector<CaptionRow> captions;
  EXPECT_EQ(batch.text_offsets.back(), batch.shape.text_rows);
  EXPECT_EQ(batch.text_rows.size(), batch.shape.text_rows * kCaptionWidth * sizeof(float));
  for (int64_t row = 0; row < batch.size(); ++row) {
    const int64_t first = batch.text_offsets[row], count = batch.text_offsets[row + 1] - first;
    CaptionRow caption{.sample = batch.sample_ids[row],
                       .dropped = batch.text_dropped[row] != 0,
                       .rows = std::vector<float>(count * kCaptionWidth)};
    std::memcpy(caption.rows.data(), batch.text_rows.data() + first * kCaptionWidth * sizeof(float),
                caption.rows.size() * sizeof(float));
    captions.push_back(std::move(caption));
  }
  return captions;
}

class CaptionBatches : public testing::Test {
 protected:
  void SetUp() override {
    test::write_store(folder_ / "store", small_info(), kSamples);
    store_ = FeatureStore::open(folder_ / "store");
    text_ = write_text(folder_ / "store/text-bert");
  }
  BatchOptions options(int64_t global_batch, double drop = 0) const {
    BatchOptions options;
    options.seed = 5;
    options.global_batch = global_batch;
    options.text_dropout_prob = drop;
    return options;
  }
  std::vector<CaptionRow> read(const BatchOptions& options, int64_t num_batches, int64_t from = 0) const {
    const auto batches = store_batches(store_, options, text_);
    if (from > 0) batches->seek(from);
    std::vector<CaptionRow> captions;
    for (int64_t i = 0; i < num_batches; ++i)
      for (CaptionRow& caption : captions_of(*batches->next())) captions.push_back(std::move(caption));
    return captions;
  }

  TempFolder folder_;
  std::shared_ptr<FeatureStore> store_;
  std::shared_ptr<const TextStore> text_;
};

TEST_F(CaptionBatches, AreTheSamplesOwnAsOftenAsTheirWeightsSay) {
  int64_t num_long = 0, num_all = 0;
  for (const CaptionRow& caption : read(options(4), 600)) {
    EXPECT_FALSE(caption.dropped);
    if (caption.sample == 0) {
      EXPECT_EQ(caption.entry(), TextStore::kNullEntry);
      continue;
    }
    const std::string text(text_->text(caption.entry()));
    EXPECT_TRUE(text.starts_with(fmt::format("{} ", caption.sample))) << text;
    EXPECT_EQ(caption.rows.size(), static_cast<size_t>((1 + caption.entry() % 3) * kCaptionWidth));
    num_long += text.ends_with("long");
    ++num_all;
  }
  EXPECT_NEAR(static_cast<double>(num_long) / static_cast<double>(num_all), 0.75, 0.03);
}

TEST_F(CaptionBatches, DroppedOnesAreEmptyOrMarked) {
  const std::vector<CaptionRow> whole = read(options(4), 300), emptied = read(options(4, 0.25), 300);
  BatchOptions learned = options(4, 0.25);
  learned.has_null_text = true;
  const std::vector<CaptionRow> marked = read(learned, 300);
  int64_t num_dropped = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(marked[i].rows, whole[i].rows);  // its rows stay: the model replaces as many
    EXPECT_FALSE(emptied[i].dropped);
    EXPECT_EQ(emptied[i].entry(), marked[i].dropped ? TextStore::kNullEntry : whole[i].entry());
    EXPECT_TRUE(marked[i].dropped || whole[i].sample != 0);  // without a caption: as dropped
    num_dropped += marked[i].dropped && whole[i].sample != 0;
  }
  EXPECT_NEAR(static_cast<double>(num_dropped) / 1100, 0.25, 0.04);
}

TEST_F(CaptionBatches, BelongToThePositionAlone) {
  const std::vector<CaptionRow> expected = read(options(12, 0.3), 10);
  EXPECT_EQ(read(options(12, 0.3), 4, /*from=*/72), std::vector(expected.begin() + 72, expected.end()));
  BatchOptions threaded = options(12, 0.3);
  threaded.num_threads = 4;
  EXPECT_EQ(read(threaded, 10), expected);
  for (const int64_t world_size : {2, 3}) {
    std::vector<std::vector<CaptionRow>> ranks;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      BatchOptions ranked = options(12, 0.3);
      ranked.rank = rank;
      ranked.world_size = world_size;
      ranks.push_back(read(ranked, 10));
    }
    std::vector<CaptionRow> together;
    const size_t each = 12 / static_cast<size_t>(world_size);
    for (size_t batch = 0; batch < 10; ++batch)
      for (const auto& rank : ranks)
        together.insert(together.end(), rank.begin() + batch * each, rank.begin() + (batch + 1) * each);
    EXPECT_EQ(together, expected) << world_size;
  }
}

TEST_F(CaptionBatches, OfNoStoreHaveTheAskedShape) {
  DataShape shape = {.channels = 4, .lanes = {{.height = 2, .width = 2}}};
  shape.text = {.width = kCaptionWidth, .max_rows = 5};
  std::set<int64_t> lengths;
  const auto batches = synthetic_batches(shape, options(8));
  for (int i = 0; i < 40; ++i)
    for (const CaptionRow& caption : captions_of(*batches->next()))
      lengths.insert(static_cast<int64_t>(caption.rows.size()) / kCaptionWidth);
  EXPECT_EQ(lengths, (std::set<int64_t>{1, 2, 3, 4, 5}));
  shape.text.is_padded = true;
  EXPECT_EQ(synthetic_batches(shape, options(8))->next()->shape.text_rows, 40);
}

TEST_F(CaptionBatches, TextShapeCountsWhatTheSamplesHave) {
  const TextShape shape = text_shape(*text_);
  EXPECT_EQ(shape.width, kCaptionWidth);
  EXPECT_EQ(shape.max_rows, 3);
  EXPECT_NEAR(shape.mean_rows, 2, 0.35);
  EXPECT_FALSE(shape.is_padded);
}

}  // namespace
}  // namespace kiln
