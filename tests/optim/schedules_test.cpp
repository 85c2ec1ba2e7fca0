#include <cmath>
#include <utility>
#include <vector>

#include "optim/ema.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(LrSchedule, ListsWhatIsTestedHere) {
  EXPECT_THAT(choice_names<LrShape>(), ElementsAre("constant", "cosine", "linear"));
}

TEST(LrSchedule, ConstantAfterTheWarmUp) {
  const LrSchedule schedule{.peak = 2, .warmup_steps = 4};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 0.5);  // never a step without a rate
  EXPECT_DOUBLE_EQ(lr_at(schedule, 3, 0.1), 2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 400, 1), 2);
  EXPECT_DOUBLE_EQ(lr_at({.peak = 3}, 0, 0), 3);
}

TEST(LrSchedule, CosineFollowsProgressToItsLowestRate) {
  const LrSchedule schedule{.shape = LrShape::kCosine, .peak = 2, .min_lr_ratio = 0.1};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 50, 0.5), 1.1);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 100, 1), 0.2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 130, 1.3), 0.2);  // a run that was prolonged
}

TEST(LrSchedule, LinearFollowsProgressToItsLowestRate) {
  const LrSchedule schedule{.shape = LrShape::kLinear, .peak = 2, .min_lr_ratio = 0.1};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 75, 0.75), 0.65);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 100, 1), 0.2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 130, 1.3), 0.2);
}

// DeepSpeed's WarmupLR at its iteration step + 1 (whose iteration 0 has no rate).
TEST(LrSchedule, LogWarmUpIsSteepAtFirst) {
  const LrSchedule schedule{.peak = 3, .warmup = WarmupShape::kLog, .warmup_steps = 100};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 3 * std::log(2) / std::log(100));
  EXPECT_DOUBLE_EQ(lr_at(schedule, 8, 0), 1.5);  // log(10) / log(100)
  EXPECT_DOUBLE_EQ(lr_at(schedule, 98, 0), 3);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 99, 0), 3);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 1000, 0), 3);
  EXPECT_DOUBLE_EQ(lr_at({.peak = 3, .warmup = WarmupShape::kLog, .warmup_steps = 1}, 0, 0), 3);
}

TEST(LrSchedule, RefusesByOptionName) {
  EXPECT_ERROR(validate(LrSchedule{.peak = 0}), "--lr ");
  EXPECT_ERROR(validate(LrSchedule{.warmup_steps = -1}), "--lr-warmup-steps");
  EXPECT_ERROR(validate(LrSchedule{.min_lr_ratio = 2}), "--min-lr-ratio");
}

TEST(EmaSchedule, ConstantIsConstantAndDiffusersWarmsUp) {
  EXPECT_THAT(choice_names<EmaSchedule>(), ElementsAre("constant", "diffusers"));
  EXPECT_DOUBLE_EQ(ema_decay_at(EmaSchedule::kConstant, 0.9999, 1), 0.9999);
  EXPECT_DOUBLE_EQ(ema_decay_at(EmaSchedule::kDiffusers, 0.9999, 1), 0);
  EXPECT_DOUBLE_EQ(ema_decay_at(EmaSchedule::kDiffusers, 0.9999, 2), 2.0 / 11);
  EXPECT_DOUBLE_EQ(ema_decay_at(EmaSchedule::kDiffusers, 0.9, 1000), 0.9);
}

// The scale after each step, 'x' being an overflow.
std::vector<double> scales(const LossScalerOptions& options, const std::string& steps) {
  LossScaler scaler(options, /*enabled=*/true);
  std::vector<double> scales;
  for (char step : steps) {
    scaler.update(step != 'x');
    scales.push_back(scaler.scale());
  }
  return scales;
}

// Every expectation is what deepspeed 0.19.8's DynamicLossScaler gives for these steps.
TEST(LossScaler, HalvesAtOverflowAndDoublesAfterAWindow) {
  EXPECT_THAT(scales({.initial_scale = 8, .growth_interval = 3}, ".......x...."),
              ElementsAre(8, 8, 8, 16, 16, 16, 32, 16, 16, 16, 16, 32));
  EXPECT_THAT(scales({.initial_scale = 8, .min_scale = 4, .growth_interval = 1}, "xxx..."),
              ElementsAre(4, 4, 4, 4, 8, 16));
}

TEST(LossScaler, HysteresisLetsOverflowsPass) {
  const LossScalerOptions options{.initial_scale = 64, .growth_interval = 2, .hysteresis = 2};
  EXPECT_THAT(scales(options, "x.x.x...x.x"), ElementsAre(64, 64, 32, 32, 16, 16, 16, 32, 32, 32, 16));
  EXPECT_THAT(
      scales({.initial_scale = 64, .growth_interval = 2, .hysteresis = 2, .consecutive_hysteresis = true},
             "x.x.xx.x"),
      ElementsAre(64, 64, 64, 64, 64, 32, 32, 32));
}

TEST(LossScaler, AFixedScaleStays) {
  EXPECT_THAT(scales({.fixed_scale = 128, .growth_interval = 1}, "x..x"), ElementsAre(128, 128, 128, 128));
  EXPECT_FALSE(LossScaler({.fixed_scale = 128}, true).explains_overflow(128));
}

TEST(LossScaler, ExplainsOverflowsWhileItCanShrink) {
  const LossScaler scaler({.min_scale = 2}, true);
  EXPECT_TRUE(scaler.explains_overflow(4));
  EXPECT_FALSE(scaler.explains_overflow(2));
  EXPECT_FALSE(LossScaler().explains_overflow(4));
}

TEST(LossScaler, IsOneForOtherDtypes) {
  LossScaler off;
  off.update(false);
  off.restore(1024, 5, 1);
  EXPECT_EQ(off.scale(), 1);
}

TEST(LossScaler, SurvivesACheckpoint) {
  const LossScalerOptions options{.initial_scale = 64, .growth_interval = 2, .hysteresis = 2};
  LossScaler before(options, true);
  before.update(false);
  before.update(true);
  LossScaler after(options, true);
  after.restore(before.scale(), before.good_steps(), before.overflows());
  for (bool finite : {false, true, true, true, false}) {
    before.update(finite);
    after.update(finite);
    EXPECT_EQ(before.scale(), after.scale());
  }
  LossScaler after_bf16({}, true);
  after_bf16.restore(1, 0, 0);  // the run so far had no scale
  EXPECT_EQ(after_bf16.scale(), 65536);
}

TEST(LossScaler, ResumesAtTheSmallestScaleToo) {
  const LossScalerOptions options{.initial_scale = 2};
  for (const bool finite : {false, true}) {
    LossScaler before(options, true), after(options, true);
    before.update(false);
    before.update(finite);
    ASSERT_EQ(before.scale(), 1);
    after.restore(before.scale(), before.good_steps(), before.overflows());
    EXPECT_EQ(after.scale(), 1);
  }
}

TEST(LossScaler, RefusesByOptionName) {
  for (const auto& [options, name] : {std::pair{LossScalerOptions{.fixed_scale = -1}, "--loss-scale "},
                                      {LossScalerOptions{.initial_scale = 0}, "--loss-scale-initial"},
                                      {LossScalerOptions{.min_scale = 0}, "--loss-scale-min"},
                                      {LossScalerOptions{.growth_interval = 0}, "--loss-scale-window"},
                                      {LossScalerOptions{.hysteresis = 0}, "--loss-scale-hysteresis"}})
    EXPECT_ERROR(validate(options), name);
}

}  // namespace
}  // namespace kiln
