// The loss of samples that are not trained on: what the step would say of the same draws, whatever the ranks,
// and nothing of training moves.
#include "train/validation.h"

#include <map>
#include <set>

#include "data/test_store.h"
#include "parallel/rank_threads.h"
#include "step/forward_pass.h"
#include "train/dataset/store_data.h"
#include "train/placements.h"
#include "train/sample_grid.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using test::rows_of, test::small_info, test::TinyOptions, test::TinyTraining, test::write_store;

constexpr int64_t kImages = 13;

bool never() { return false; }

Training training_of(TinyTraining tiny) {
  return {.objective = std::move(tiny.objective),
          .optimizer = std::move(tiny.optimizer),
          .model_config = {},
          .denoiser = std::move(tiny.denoiser),
          .state = std::move(tiny.state),
          .step = std::move(tiny.step)};
}

// --- the average in the weights' place ---

std::vector<double> losses_of(const TinyTraining& tiny, int64_t first, int64_t num_steps) {
  std::vector<double> losses;
  for (int64_t step = first; step < first + num_steps; ++step)
    losses.push_back(
        tiny.step->run(rows_of(tiny.batch(5, static_cast<uint64_t>(step)), tiny.state->zero->group()), 1e-3)
            .loss);
  return losses;
}

// What every rank's weights are when they are whole, in f32.
at::Tensor gathered(const TinyTraining& tiny) {
  std::vector<at::Tensor> all;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    const FlatUnit& unit = tiny.state->segments[s].unit;
    tiny.state->zero->gather(s, 1);
    for (size_t i = 0; i < unit.layout().slots.size(); ++i)
      all.push_back(unit.view(unit.compute_weights, i).to(at::kFloat).flatten().clone());
    tiny.state->zero->release(s);
  }
  return at::cat(all);
}

at::Tensor averages(const TinyTraining& tiny, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    const FlatUnit& unit = tiny.state->segments[s].unit;
    const StateLease state = unit.lease(Access::kRead);
    const at::Tensor whole = tiny.state->zero->whole(s, state.emas[0]);
    for (size_t i = 0; i < unit.layout().slots.size(); ++i)
      all.push_back(unit.view(whole, i).to(dtype).to(at::kFloat).flatten());
  }
  return at::cat(all);
}

class AverageInPlace : public ::testing::TestWithParam<at::ScalarType> {};

// KILN_FULL=1: every stage on one rank and on three, in every dtype. Else each pair of them.
TEST_P(AverageInPlace, ComputesForAWhileAndLeavesNoTrace) {
  const bool full = std::getenv("KILN_FULL") != nullptr;
  const int64_t dtype = GetParam() == at::kFloat ? 0 : GetParam() == at::kBFloat16 ? 1 : 2;
  for (const int64_t world_size : {1, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage)
        for (const Placement placement : {Placement::kDevice, Placement::kNvme}) {
          if (placement == Placement::kNvme && stage % 2 == 0) continue;
          if (!full && world_size > 1 && (stage + (placement == Placement::kNvme)) % 3 != dtype) continue;
          const TinyOptions options = test::placed({.compute_dtype = GetParam(),
                                                    .ema_decays = {0.5, 0.9},
                                                    .group = group,
                                                    .zero = {.stage = stage}},
                                                   placement, stage == 3 ? placement : Placement::kDevice);
          const TinyTraining plain(options), watched(options);
          EXPECT_EQ(losses_of(plain, 0, 2), losses_of(watched, 0, 2));
          const at::Tensor before = gathered(watched), expected = averages(watched, GetParam());
          ASSERT_FALSE(at::equal(before, expected));
          with_first_ema(*watched.state, [&] { EXPECT_TRUE(at::equal(gathered(watched), expected)); });
          EXPECT_TRUE(at::equal(gathered(watched), before));
          EXPECT_EQ(losses_of(plain, 2, 2), losses_of(watched, 2, 2)) << "stage " << stage;
        }
    });
}

INSTANTIATE_TEST_SUITE_P(ComputeDtypes, AverageInPlace,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

// --- a forward pass ---

TEST(ForwardLosses, AreThoseOfTheStep) {
  for (const int64_t world_size : {1, 2})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        for (const bool has_skips : {false, true})
          for (int64_t stage = 0; stage <= 3; ++stage) {
            const Training training = training_of(TinyTraining({.compute_dtype = dtype,
                                                                .objective = "epsilon",
                                                                .has_skips = has_skips,
                                                                .group = group,
                                                                .zero = {.stage = stage}}));
            const StepBatch batch = rows_of(TinyTraining(TinyOptions{}).batch(5), *group);
            const CommunicationVolume before = group->volume();
            const at::Tensor losses = forward_losses(training, batch).to(at::kDouble);
            int64_t whole = 0;
            for (const auto& segment : training.state->segments) {
              whole += segment.unit.size();
              if (stage == 3) {
                EXPECT_EQ(segment.unit.compute_weights.storage().data(), nullptr);
              }
            }
            EXPECT_EQ(group->volume().all_gathered - before.all_gathered,
                      stage == 3 && world_size > 1 ? whole : 0);
            const StepResult step = training.step->run(batch, 1e-3);
            const auto first = step.losses.begin() + batch.first_row;
            EXPECT_TRUE(
                at::equal(losses, at::tensor(std::vector<double>(first, first + batch.size()), at::kDouble)));
          }
    });
}

// --- a store of held-out samples ---

class Validations : public ::testing::Test {
 protected:
  Validations() {
    info_.channels = 4;
    info_.lanes = {{.height = 8, .width = 8}};
    info_.image_size = 64;
    write_store(folder_ / "data", info_, 5);
    write_store(folder_ / "held-out", info_, kImages);
    options_ = changed(test::tiny_dit_options(),
                       "depth=2 num-classes=0 objective=epsilon ema-decay=0.5 seed=3 threads=1");
    options_.data.path = folder_ / "data";
    options_.validation.data = folder_ / "held-out";
    at::set_num_threads(1);
  }

  Validation open() const { return Validation(options_, data(), at::kCPU); }
  TrainingData data() const { return open_training_data(describe(options_), options_, at::kCPU, at::kFloat); }
  Training train(const std::shared_ptr<ProcessGroup>& group, const TrainOptions& options,
                 int64_t num_steps) const {
    Training training = build_training(options, data().shape, at::kCPU, group);
    const auto batches = data().batches({.seed = options.seed,
                                         .global_batch = options.global_batch,
                                         .rank = group->rank(),
                                         .world_size = group->world_size()});
    for (int64_t step = 0; step < num_steps; ++step)
      training.step->run(as_tensors(*batches->next(), *training.objective), 1e-2);
    return training;
  }

  TempFolder folder_;
  StoreInfo info_ = small_info();
  TrainOptions options_;
};

TEST_F(Validations, EqualOnAnyRanksStagesAndBatches) {
  const auto options_with = [&](int64_t images) {
    TrainOptions options = options_;
    options.validation.images = images;
    return options;
  };
  std::map<int64_t, ValidationLoss> expected;  // by the number of images
  const Training alone = train(std::make_shared<ProcessGroup>(), options_, 3);
  for (const int64_t images : {0, 7, 1}) {
    expected[images] = *Validation(options_with(images), data(), at::kCPU).run(alone, at::kCPU, never);
    EXPECT_EQ(expected[images].num_images, images == 0 ? kImages : images);
    EXPECT_EQ(validation_samples(options_with(images)), expected[images].num_images);
  }
  for (const int64_t world_size : {1, 2, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        TrainOptions options = options_;
        options.zero.stage = stage;
        options.micro_batch = stage % 3;  // 0: the rank's 6, 3 or 2 images at once
        const Training training = train(group, options, 3);
        for (const auto& [images, wanted] : expected) {
          options.validation.images = images;
          const ValidationLoss loss = *Validation(options, data(), at::kCPU).run(training, at::kCPU, never);
          EXPECT_NEAR(loss.loss / wanted.loss, 1, 5e-6) << world_size << " ranks, stage " << stage;
          for (size_t q = 0; q < 4; ++q) {
            EXPECT_EQ(std::isnan(loss.quartiles[q]), std::isnan(wanted.quartiles[q]));
            if (!std::isnan(wanted.quartiles[q])) {
              EXPECT_NEAR(loss.quartiles[q] / wanted.quartiles[q], 1, 5e-6);
            }
          }
          // And the same bits again, and on every rank.
          const ValidationLoss again = *Validation(options, data(), at::kCPU).run(training, at::kCPU, never);
          EXPECT_EQ(again.loss, loss.loss);
          EXPECT_EQ(group->sum({group->rank() == 0 ? loss.loss : 0}, "the first one's").front(), loss.loss);
        }
      }
    });
}

// The draws of the whole store as one batch, and the step's loss with the averages as weights.
TEST_F(Validations, IsTheStepsLossOfEachSampleOnce) {
  const auto one = std::make_shared<ProcessGroup>();
  const Training trained = train(one, options_, 3);
  const ValidationLoss loss = *open().run(trained, at::kCPU, never);

  const Training averaged = train(one, options_, 0);
  for (size_t s = 0; s < trained.state->segments.size(); ++s) {
    averaged.state->segments[s].unit.master.copy_(trained.state->segments[s].unit.emas[0]);
    averaged.state->segments[s].unit.refresh_weight_shard();
  }
  const auto batches = store_batches(FeatureStore::open(options_.validation.data),
                                     {.seed = validation_seed(options_.seed), .global_batch = kImages});
  const std::shared_ptr<const Batch> batch = batches->next();
  EXPECT_EQ(std::set<int64_t>(batch->sample_ids.begin(), batch->sample_ids.end()).size(), kImages);
  const StepBatch tensors = as_tensors(*batch, *averaged.objective);
  const StepResult step = averaged.step->run(tensors, 0);
  EXPECT_NEAR(loss.loss / step.loss, 1, 1e-6);
  const at::Tensor positions = averaged.objective->position(tensors.timesteps);
  double sum = 0, count = 0;
  for (int64_t i = 0; i < kImages; ++i)
    if (positions[i].item<double>() < 0.25) {
      sum += step.losses[static_cast<size_t>(i)];
      count += 1;
    }
  ASSERT_GT(count, 0);
  EXPECT_NEAR(loss.quartiles[0] / (sum / count), 1, 1e-6);
}

TEST_F(Validations, UsesTheWeightsWhereThereIsNoAverage) {
  const auto one = std::make_shared<ProcessGroup>();
  TrainOptions plain = options_;
  plain.ema.decays = {};
  const Training averaged = train(one, options_, 3);
  for (const auto& segment : averaged.state->segments) segment.unit.emas[0].copy_(segment.unit.master);
  const double expected = open().run(averaged, at::kCPU, never)->loss;
  EXPECT_EQ(Validation(plain, data(), at::kCPU).run(train(one, plain, 3), at::kCPU, never)->loss, expected);
  EXPECT_EQ(Validation(plain, data(), at::kCPU).weights(), "model");
  EXPECT_EQ(open().weights(), "ema-0.5");
}

TEST_F(Validations, AStopOfOneRankEndsItOnAll) {
  options_.micro_batch = 1;
  options_.zero.stage = 3;
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    const Training stopped = train(group, options_, 1), plain = train(group, options_, 1);
    int64_t asked = 0;
    EXPECT_FALSE(open().run(stopped, at::kCPU, [&] { return ++asked == 2 && group->rank() == 1; }));
    EXPECT_EQ(asked, 2);
    StepBatch global = TinyTraining(TinyOptions{}).batch(5);
    global.conditioning.class_labels.clamp_(0, 3);
    const StepBatch batch = rows_of(global, *group);
    EXPECT_EQ(stopped.step->run(batch, 1e-3).losses, plain.step->run(batch, 1e-3).losses);
  });
}

TEST_F(Validations, RefusesWhatDoesNotFit) {
  const auto refusal = [&](const std::function<void(StoreInfo&)>& change) {
    StoreInfo info = info_;
    change(info);
    const TempFolder other;
    write_store(other / "store", info, 3);
    TrainOptions options = options_;
    options.validation.data = other / "store";
    return message_of([&] { Validation(options, data(), at::kCPU); });
  };
  EXPECT_THAT(refusal([](StoreInfo& info) { info.image_size = 128; }),
              has_all("128-pixel images", "--image-size 64"));
  EXPECT_THAT(refusal([](StoreInfo& info) { info.lanes = {{.height = 16, .width = 16}}; }),
              has_all("4 x 16 x 16", "4 x 8 x 8"));
  EXPECT_THAT(refusal([](StoreInfo& info) { info.autoencoder_fingerprint = "fedcba9876543210"; }),
              has_all("another autoencoder", "fedcba9876543210"));
  EXPECT_THAT(refusal([](StoreInfo& info) { info.class_names.push_back("owl"); }),
              has_all("4 classes, --data has 3", "'owl'"));
  EXPECT_THAT(refusal([](StoreInfo& info) { info.class_names[1] = "wolf"; }),
              HasSubstr("class 1 is 'wolf', in --data 'dog'"));

  options_.validation.images = kImages + 1;
  EXPECT_ERROR(open(), "--validation-images 14 is more than the 13");
  options_.validation.images = 0;
  options_.validation.data = folder_ / "nothing";
  EXPECT_ERROR(open(), "made by kiln extract");
  options_.validation.data = folder_ / "held-out";
  options_.data.path = "synthetic";
  EXPECT_ERROR(open(), "--data synthetic");
}

// --- sample grids of divided weights ---

TEST(SampleGrids, AreOnePictureOfAllRanks) {
  // Five samples are uneven on 2, 3 and 4 ranks.
  const TrainOptions options =
      changed(test::tiny_dit_options(),
              "autoencoder=pixels image-size=16 depth=2 objective=flow num-samples=5 num-sampling-steps=3");
  const DataShape shape = synthetic_shape(options);
  ModelRecord info;
  info.objective = objective_config_of(options.objective);
  const auto draw = [&](const std::shared_ptr<ProcessGroup>& group, int64_t stage) {
    TrainOptions staged = options;
    staged.zero.stage = stage;
    const Training training = build_training(staged, shape, at::kCPU, group);
    return draw_sample_grid(
        staged, {.info = info, .training = training, .decoder = nullptr, .prompts = {}, .device = at::kCPU},
        never);
  };
  at::set_num_threads(1);
  const SampleGrid expected = draw(std::make_shared<ProcessGroup>(), 0);
  ASSERT_FALSE(expected.png.empty());
  EXPECT_GE(expected.width, 3 * 16);
  for (const int64_t world_size : {1, 2, 4})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        const SampleGrid grid = draw(group, stage);
        EXPECT_EQ(grid.png.empty(), group->rank() > 0);
        if (group->rank() > 0) continue;
        EXPECT_EQ(grid.width, expected.width);
        if (world_size == 1) {
          EXPECT_EQ(grid.png, expected.png) << stage;
        }
      }
    });
}

}  // namespace
}  // namespace kiln
