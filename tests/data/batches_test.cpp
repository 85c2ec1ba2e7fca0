// The loader: every draw belongs to a position of the stream, whatever the batch, ranks and threads.
#include "data/loader/batches.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "core/philox.h"
#include "data/store/sample_order.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::small_info, test::write_store;

// One row of a batch, to compare streams that are cut differently.
struct Row {
  int64_t sample_id, label;
  double time_uniform;
  std::vector<float> x_0, noise;
  bool operator==(const Row&) const = default;
};

void append_rows(const Batch& batch, std::vector<Row>& rows) {
  const int64_t size = batch.shape.sample_elements();
  ASSERT_EQ(batch.x_0.size(), static_cast<size_t>(batch.size() * size));
  for (int64_t i = 0; i < batch.size(); ++i) {
    rows.push_back({batch.sample_ids[i],
                    batch.class_labels.empty() ? -9 : batch.class_labels[i],
                    batch.time_uniform[i],
                    {&batch.x_0[i * size], &batch.x_0[i * size] + size},
                    {&batch.noise[i * size], &batch.noise[i * size] + size}});
  }
}

std::vector<Row> read_rows(BatchSource& source, int64_t num_batches) {
  std::vector<Row> rows;
  for (int64_t i = 0; i < num_batches; ++i) append_rows(*source.next(), rows);
  return rows;
}

DataShape latents(int64_t side, int64_t num_classes) {
  return {.channels = 4, .num_classes = num_classes, .lanes = {{.height = side, .width = side}}};
}

// The sample at a position of the stream of a store of one shape.
int64_t sample_at(uint64_t seed, int64_t num_samples, int64_t position) {
  return shuffled_index(seed, position / num_samples, num_samples, position % num_samples);
}

class Batches : public testing::Test {
 protected:
  std::shared_ptr<FeatureStore> store(const StoreInfo& info, int64_t num_samples) const {
    if (!std::filesystem::exists(folder_ / "store")) write_store(folder_ / "store", info, num_samples);
    return FeatureStore::open(folder_ / "store");
  }
  static BatchOptions options(int64_t global_batch) {
    return {.seed = 17, .global_batch = global_batch, .class_dropout_prob = 0.25, .null_class = 3};
  }
  static BatchOptions options_of_rank(int64_t global_batch, int64_t rank, int64_t world_size) {
    BatchOptions ranked = options(global_batch);
    ranked.rank = rank;
    ranked.world_size = world_size;
    return ranked;
  }

 private:
  TempFolder folder_;
};

TEST_F(Batches, EveryEpochHoldsEverySampleOnce) {
  const auto source = store_batches(store(small_info(), 11), options(4));
  EXPECT_EQ(source->order().samples_per_epoch(), 11);
  const auto rows = read_rows(*source, 11);  // 4 epochs, whose borders lie inside batches
  std::set<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 11; ++i) ids.push_back(rows[epoch * 11 + i].sample_id);
    orders.insert(ids);
    std::sort(ids.begin(), ids.end());
    for (int64_t i = 0; i < 11; ++i) EXPECT_EQ(ids[i], i);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST_F(Batches, PositionsNameTheRowsOfTheGlobalStream) {
  const auto source = store_batches(store(small_info(), 11), options(4));
  for (int64_t step = 0; step < 5; ++step) {
    const auto batch = source->next();
    EXPECT_EQ(batch->first_position, 4 * step);
    EXPECT_EQ(batch->size(), 4);
    for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(batch->sample_ids[i], sample_at(17, 11, 4 * step + i));
  }
}

TEST_F(Batches, AStoreSmallerThanTheBatchFillsIt) {
  const auto batch = store_batches(store(small_info(), 3), options(8))->next();
  ASSERT_EQ(batch->size(), 8);
  std::map<int64_t, int> counts;
  for (const int64_t id : batch->sample_ids) ++counts[id];
  for (const auto& [id, count] : counts) EXPECT_GE(count, 2) << id;
  EXPECT_EQ(counts.size(), 3u);
}

TEST_F(Batches, BatchSizeRanksAndThreadsChangeNoRow) {
  const auto features = store(small_info(), 11);
  const auto expected = read_rows(*store_batches(features, options(24)), 2);
  for (const int64_t global_batch : {1, 3, 6, 12, 48}) {
    EXPECT_TRUE(read_rows(*store_batches(features, options(global_batch)), 48 / global_batch) == expected)
        << global_batch;
  }
  for (const int num_threads : {2, 5}) {
    BatchOptions threaded = options(3);
    threaded.num_threads = num_threads;
    threaded.prefetch = 7;
    EXPECT_TRUE(read_rows(*store_batches(features, threaded), 16) == expected) << num_threads;
  }
  for (const int64_t world_size : {4, 5}) {  // 5 ranks have 2 or 3 rows each
    std::vector<std::unique_ptr<BatchSource>> ranks;
    for (int64_t rank = 0; rank < world_size; ++rank)
      ranks.push_back(store_batches(features, options_of_rank(12, rank, world_size)));
    std::vector<Row> rows;
    for (int64_t step = 0; step < 4; ++step) {
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const auto batch = ranks[rank]->next();
        EXPECT_EQ(batch->global_size, 12);
        EXPECT_EQ(batch->first_row, rank * 12 / world_size);
        EXPECT_EQ(batch->first_position, step * 12 + batch->first_row);
        append_rows(*batch, rows);
      }
    }
    EXPECT_TRUE(rows == expected) << world_size;
  }
}

// Of each rank's rows, in each batch: what the loss compares row 0 with is what another rank has as a row.
TEST_F(Batches, AHaloIsTheSampleBeforeInTheGlobalBatch) {
  const auto features = store(small_info(), 11);
  for (const bool synthetic : {false, true}) {
    const auto opened = [&](const BatchOptions& draws) {
      return synthetic ? synthetic_batches(latents(8, 3), draws) : store_batches(features, draws);
    };
    const std::vector<Row> expected = read_rows(*opened(options(5)), 4);
    for (int64_t world_size = 1; world_size <= 3; ++world_size)
      for (int64_t rank = 0; rank < world_size; ++rank) {
        BatchOptions ranked = options_of_rank(5, rank, world_size);
        ranked.has_halo = true;
        ranked.input_perturbation = 0.1;
        const auto source = opened(ranked);
        for (size_t step = 0; step < 4; ++step) {
          const std::shared_ptr<const Batch> batch = source->next();
          const auto size = static_cast<size_t>(batch->size()),
                     elements = static_cast<size_t>(batch->shape.sample_elements());
          ASSERT_EQ(batch->x_0.size(), (size + 1) * elements);
          EXPECT_EQ(batch->input_noise.size(), size * elements);
          EXPECT_EQ(batch->class_labels.size(), size);
          const auto row_of = [&](size_t i) {
            return Row{.sample_id = batch->sample_ids[i],
                       .label = 0,
                       .time_uniform = batch->time_uniform[i],
                       .x_0 = {&batch->x_0[i * elements], &batch->x_0[i * elements] + elements},
                       .noise = {&batch->noise[i * elements], &batch->noise[i * elements] + elements}};
          };
          for (size_t i = 0; i <= size; ++i) {
            const size_t row = static_cast<size_t>(batch->first_row) + (i < size ? i : 4);
            Row one = expected[5 * step + row % 5];
            one.label = 0;
            EXPECT_TRUE(row_of(i) == one) << world_size << " " << rank << " " << step << " " << i;
          }
        }
      }
  }
}

TEST_F(Batches, SeekContinuesAnywhere) {
  const auto features = store(small_info(), 11);
  const auto expected = read_rows(*store_batches(features, options(1)), 60);
  BatchOptions threaded = options(5);
  threaded.num_threads = 3;
  const auto source = store_batches(features, threaded);
  for (const int64_t start : {20, 0, 45, 7, 7}) {
    source->seek(start);
    const auto rows = read_rows(*source, 3);
    for (int64_t i = 0; i < 15; ++i) ASSERT_TRUE(rows[i] == expected[start + i]) << start << " " << i;
  }
  EXPECT_ERROR(source->seek(-1), "got -1");
}

TEST_F(Batches, LatentsAreTheScaledPosterior) {
  StoreInfo info = small_info();
  info.shift_factor = 0.5;
  const auto batch = store_batches(store(info, 11), options(4))->next();
  const int64_t size = info.latent_size();
  std::vector<float> epsilon(size), noise(size);
  for (int64_t i = 0; i < batch->size(); ++i) {
    philox_normal(17, Draw::kPosterior, i, epsilon);
    philox_normal(17, Draw::kNoise, i, noise);
    EXPECT_EQ(batch->time_uniform[i], philox_uniform(17, Draw::kTimestep, i));
    for (int64_t e = 0; e < size; ++e) {
      const int64_t id = batch->sample_ids[i];
      const double sigma = std::exp(0.5 * test::logvar_value(id, e));
      const double expected = (test::mean_value(id, e) + sigma * epsilon[e] - 0.5) * 0.18215;
      EXPECT_NEAR(batch->x_0[i * size + e], expected, 1e-5);
      EXPECT_EQ(batch->noise[i * size + e], noise[e]);
    }
  }
}

TEST_F(Batches, WithoutPosteriorTheMeanIsScaled) {
  BatchOptions plain = options(4);
  plain.draw_posterior = false;
  const auto batch = store_batches(store(small_info(), 11), plain)->next();
  EXPECT_EQ(batch->x_0[7], test::mean_value(batch->sample_ids[0], 7) * 0.18215f);
}

TEST_F(Batches, AlreadyScaledLatentsAreLeftAlone) {
  StoreInfo info = small_info();
  info.has_logvar = false;
  info.already_scaled = true;
  const auto batch = store_batches(store(info, 11), options(4))->next();
  EXPECT_EQ(batch->x_0[7], test::mean_value(batch->sample_ids[0], 7));
}

TEST_F(Batches, FlippedHalvesOfTheStoreAreChosenByThePosition) {
  StoreInfo info = small_info();
  info.num_flips = 2;
  info.has_logvar = false;
  info.already_scaled = true;
  const auto features = store(info, 11);
  const auto source = store_batches(features, options(1));
  int num_flipped = 0;
  for (int64_t position = 0; position < 400; ++position) {
    const auto batch = source->next();
    const bool flipped = philox_uniform(17, Draw::kFlip, position) < 0.5;
    EXPECT_EQ(batch->x_0[0], test::mean_value(batch->sample_ids[0], flipped ? info.latent_size() : 0));
    num_flipped += flipped;
  }
  EXPECT_NEAR(num_flipped, 200, 50);
  BatchOptions fixed = options(1);
  fixed.flip = false;
  const auto unflipped = store_batches(features, fixed);
  for (int64_t i = 0; i < 20; ++i) {
    const auto batch = unflipped->next();
    EXPECT_EQ(batch->x_0[0], test::mean_value(batch->sample_ids[0], 0));
  }
}

TEST_F(Batches, PixelsAreMirroredOnTheFly) {
  StoreInfo info = small_info();
  info.autoencoder = "pixels";
  info.has_logvar = false;
  info.scaling_factor = 1;
  const auto source = store_batches(store(info, 11), options(1));
  bool seen[2] = {};
  for (int64_t position = 0; position < 40; ++position) {
    const auto batch = source->next();
    const bool flipped = philox_uniform(17, Draw::kFlip, position) < 0.5;
    seen[flipped] = true;
    for (int64_t e = 0; e < info.latent_size(); ++e) {
      const int64_t row = e / info.lanes[0].width, column = e % info.lanes[0].width;
      const int64_t from = row * info.lanes[0].width + (flipped ? info.lanes[0].width - 1 - column : column);
      ASSERT_EQ(batch->x_0[e], test::mean_value(batch->sample_ids[0], from));
    }
  }
  EXPECT_TRUE(seen[0] && seen[1]);
}

TEST_F(Batches, LabelsAreDroppedAtTheAskedRate) {
  const auto source = store_batches(store(small_info(), 11), options(1000));
  const auto batch = source->next();
  int64_t num_dropped = 0;
  for (int64_t i = 0; i < batch->size(); ++i) {
    const bool dropped = batch->class_labels[i] == 3;
    EXPECT_EQ(batch->class_labels[i], dropped ? 3 : batch->sample_ids[i] % 3);
    num_dropped += dropped;
  }
  EXPECT_NEAR(static_cast<double>(num_dropped), 250, 5 * std::sqrt(1000 * 0.25 * 0.75));
}

TEST_F(Batches, WithoutClassesThereAreNoLabels) {
  StoreInfo info = small_info();
  info.class_names.clear();
  EXPECT_TRUE(store_batches(store(info, 5), options(4))->next()->class_labels.empty());
}

TEST_F(Batches, ImpossibleOptionsAreRefused) {
  const auto features = store(small_info(), 11);
  const auto message = [&](auto change) {
    BatchOptions changed = options(6);
    change(changed);
    return message_of([&] { store_batches(features, changed); });
  };
  EXPECT_THAT(message([](BatchOptions& o) { o.global_batch = 0; }), HasSubstr("global_batch"));
  EXPECT_THAT(message([](BatchOptions& o) { o.world_size = 7; }), HasSubstr("for each of 7 ranks, got 6"));
  EXPECT_THAT(message([](BatchOptions& o) { o.rank = 1; }), HasSubstr("expected a rank from 0 to 0, got 1"));
  EXPECT_THAT(message([](BatchOptions& o) { o.class_dropout_prob = 1.5; }), HasSubstr("class_dropout_prob"));
  EXPECT_THAT(message([](BatchOptions& o) { o.null_class = -1; }), HasSubstr("null class"));
}

// --- queue and buffers ---

// A store whose reads fail from one sample on.
class FailingStore : public FeatureStore {
 public:
  FailingStore() {
    info_ = small_info();
    info_.has_logvar = false;
    info_.num_samples = 8;
    info_.shards = {{.file = "all", .num_samples = 8, .xxh3 = ""}};
  }
  void read_mean(std::span<const int64_t> ids, std::span<const uint8_t>,
                 std::span<float> out) const override {
    if (ids[0] == 5) throw Error("[test] sample 5 is broken");
    std::fill(out.begin(), out.end(), 1.0f);
  }
  void read_logvar(std::span<const int64_t>, std::span<const uint8_t>, std::span<float>) const override {}
  void prefetch(std::span<const int64_t>) const override {}
  int64_t label(int64_t) const override { return 0; }
  std::string caption(int64_t) const override { return ""; }
  std::string sample_name(int64_t) const override { return "x"; }
  int64_t lane(int64_t) const override { return 0; }
  std::array<int64_t, 2> image_hw(int64_t) const override { return {}; }
};

TEST(BatchQueue, ErrorsOfWorkersReachNextInOrder) {
  const auto source = store_batches(std::make_shared<FailingStore>(), {.global_batch = 1, .num_threads = 2});
  int64_t broken_at = 0;
  while (sample_at(0, 8, broken_at) != 5) ++broken_at;
  for (int64_t i = 0; i < broken_at; ++i) EXPECT_EQ(source->next()->first_position, i);
  EXPECT_ERROR(source->next(), "sample 5 is broken");
  EXPECT_ERROR(source->next(), "sample 5 is broken");
  source->seek(broken_at + 1);
  EXPECT_EQ(source->next()->first_position, broken_at + 1);
}

BatchOptions synthetic_options() { return {.seed = 3, .global_batch = 8, .num_threads = 2, .prefetch = 3}; }

TEST(BatchQueue, RunsAheadButNotFurtherThanAsked) {
  const auto source = synthetic_batches(latents(8, 10), synthetic_options());
  EXPECT_EQ(source->ready(), 0);
  source->next();
  for (int i = 0; i < 1000 && source->ready() < 3; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(source->ready(), 3);
  EXPECT_GT(source->take_stall_seconds(), 0);  // the first batch was waited for
  EXPECT_EQ(source->take_stall_seconds(), 0);
}

TEST(BatchQueue, BuffersAreUsedAgainOnlyWhenLetGo) {
  const auto source = synthetic_batches(latents(16, 10), synthetic_options());
  const auto kept = source->next();
  const Batch copy = *kept;
  std::set<const float*> buffers;
  for (int i = 0; i < 50; ++i) {
    const auto batch = source->next();
    EXPECT_NE(batch->x_0.data(), kept->x_0.data());
    buffers.insert(batch->x_0.data());
  }
  EXPECT_LE(buffers.size(), 7u);  // 3 ready, 2 being made, 1 in hand, 1 on its way back
  EXPECT_EQ(kept->x_0, copy.x_0);
  EXPECT_EQ(kept->noise, copy.noise);
}

TEST(BatchQueue, BatchesOutliveTheirSource) {
  auto source = synthetic_batches(latents(8, 10), synthetic_options());
  const auto batch = source->next();
  source.reset();
  EXPECT_EQ(batch->x_0.size(), 8u * 4 * 8 * 8);
}

TEST(BatchQueue, EndsWhileWorkersAreBusy) {
  for (int i = 0; i < 50; ++i) {
    const auto source = synthetic_batches(latents(16, 10), synthetic_options());
    if (i % 3 > 0) source->next();
    if (i % 3 > 1) source->seek(1000);
  }
}

// --- synthetic data ---

TEST(SyntheticBatches, AreNormalAndDifferEverywhere) {
  BatchOptions options = synthetic_options();
  options.global_batch = 256;
  options.class_dropout_prob = 0.1;
  options.null_class = 10;
  const auto source = synthetic_batches(latents(8, 10), options);
  EXPECT_EQ(source->order().samples_per_epoch(), 0);
  const auto batch = source->next();
  double sum = 0, squares = 0, product = 0;
  for (size_t i = 0; i < batch->x_0.size(); ++i) {
    sum += batch->x_0[i];
    squares += batch->x_0[i] * batch->x_0[i];
    product += batch->x_0[i] * batch->noise[i];
  }
  const double n = static_cast<double>(batch->x_0.size()), bound = 5 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 0, bound);
  EXPECT_NEAR(squares / n, 1, bound * std::sqrt(2.0));
  EXPECT_NEAR(product / n, 0, bound);
  std::set<int64_t> labels(batch->class_labels.begin(), batch->class_labels.end());
  EXPECT_EQ(labels.size(), 11u);
  EXPECT_EQ(*labels.begin(), 0);
  EXPECT_EQ(*labels.rbegin(), 10);
}

BatchOptions noise_options(double offset, double perturbation) {
  return {.seed = 5, .global_batch = 3, .offset_noise = offset, .input_perturbation = perturbation};
}

// As diffusers' scripts have it: noise += offset * randn(B, C, 1, 1).
TEST(SyntheticBatches, OffsetNoiseMovesChannelsAsAWhole) {
  const auto plain = synthetic_batches(latents(16, 0), noise_options(0, 0))->next();
  const auto moved = synthetic_batches(latents(16, 0), noise_options(0.5, 0))->next();
  EXPECT_EQ(plain->x_0, moved->x_0);
  EXPECT_TRUE(moved->input_noise.empty());
  const size_t area = 16 * 16;
  std::set<float> offsets;
  double squares = 0;
  for (size_t channel = 0; channel < plain->noise.size() / area; ++channel) {
    const float offset = moved->noise[channel * area] - plain->noise[channel * area];
    for (size_t i = channel * area; i < (channel + 1) * area; ++i)
      ASSERT_NEAR(moved->noise[i] - plain->noise[i], offset, 1e-5);
    offsets.insert(offset);
    squares += offset * offset / 0.25;
  }
  EXPECT_EQ(offsets.size(), 12u);
  EXPECT_GT(squares / 12, 0.2);
  EXPECT_LT(squares / 12, 3);
}

// new_noise = noise + perturbation * randn_like(noise), of x_t alone.
TEST(SyntheticBatches, InputPerturbationIsNoiseOfItsOwn) {
  const auto plain = synthetic_batches(latents(16, 0), noise_options(0, 0))->next();
  const auto batch = synthetic_batches(latents(16, 0), noise_options(0, 0.1))->next();
  EXPECT_EQ(plain->noise, batch->noise);
  ASSERT_EQ(batch->input_noise.size(), batch->noise.size());
  double squares = 0, product = 0;
  for (size_t i = 0; i < batch->noise.size(); ++i) {
    const double drawn = (batch->input_noise[i] - batch->noise[i]) / 0.1;
    squares += drawn * drawn;
    product += drawn * batch->noise[i];
  }
  const auto count = static_cast<double>(batch->noise.size());
  EXPECT_NEAR(squares / count, 1, 0.1);
  EXPECT_NEAR(product / count, 0, 0.1);
  // The draw belongs to the position.
  auto later = synthetic_batches(latents(16, 0), noise_options(0, 0.1));
  later->seek(3);
  EXPECT_NE(later->next()->input_noise, batch->input_noise);
}

TEST(SyntheticBatches, WithoutClassesThereAreNoLabels) {
  EXPECT_TRUE(synthetic_batches(latents(8, 0), synthetic_options())->next()->class_labels.empty());
}

}  // namespace
}  // namespace kiln
