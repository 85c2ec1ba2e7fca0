#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "optim/ema.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(LrSchedule, ListsWhatIsTestedHere) {
  EXPECT_THAT(lr_schedule_names(), ElementsAre("constant", "cosine"));
}

TEST(LrSchedule, ConstantAfterTheWarmUp) {
  const LrSchedule schedule{.lr = 2, .warmup_steps = 4};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 0.5);  // never a step without a rate
  EXPECT_DOUBLE_EQ(lr_at(schedule, 3, 0.1), 2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 400, 1), 2);
  EXPECT_DOUBLE_EQ(lr_at({.lr = 3}, 0, 0), 3);
}

TEST(LrSchedule, CosineFollowsProgressToItsLowestRate) {
  const LrSchedule schedule{.name = "cosine", .lr = 2, .min_lr_ratio = 0.1};
  EXPECT_DOUBLE_EQ(lr_at(schedule, 0, 0), 2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 50, 0.5), 1.1);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 100, 1), 0.2);
  EXPECT_DOUBLE_EQ(lr_at(schedule, 130, 1.3), 0.2);  // a run that was prolonged
}

TEST(LrSchedule, RefusesByOptionName) {
  EXPECT_THAT([] { validate(LrSchedule{.name = "linear"}); },
              ThrowsMessage<Error>(HasSubstr("--lr-schedule")));
  EXPECT_THAT([] { validate(LrSchedule{.lr = 0}); }, ThrowsMessage<Error>(HasSubstr("--lr ")));
  EXPECT_THAT([] { validate(LrSchedule{.warmup_steps = -1}); },
              ThrowsMessage<Error>(HasSubstr("--lr-warmup-steps")));
  EXPECT_THAT([] { validate(LrSchedule{.min_lr_ratio = 2}); },
              ThrowsMessage<Error>(HasSubstr("--min-lr-ratio")));
}

TEST(EmaSchedule, ConstantIsConstantAndDiffusersWarmsUp) {
  EXPECT_THAT(ema_schedule_names(), ElementsAre("constant", "diffusers"));
  EXPECT_DOUBLE_EQ(ema_decay_at("constant", 0.9999, 1), 0.9999);
  EXPECT_DOUBLE_EQ(ema_decay_at("diffusers", 0.9999, 1), 0);
  EXPECT_DOUBLE_EQ(ema_decay_at("diffusers", 0.9999, 2), 2.0 / 11);
  EXPECT_DOUBLE_EQ(ema_decay_at("diffusers", 0.9, 1000), 0.9);
  EXPECT_THROW(ema_decay_at("cosine", 0.9, 1), Error);
}

TEST(LossScaler, HalvesAtOverflowAndGrowsAfterAWindow) {
  LossScaler scaler({.enabled = true, .initial_scale = 8, .growth_interval = 3});
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 4);
  for (int i = 0; i < 2; ++i) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.update(true);
  scaler.update(false);  // an overflow restarts the window
  for (int i = 0; i < 2; ++i) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
  for (int i = 0; i < 10; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScaler, IsOneForOtherDtypesAndSurvivesACheckpoint) {
  LossScaler off, on({.enabled = true});
  off.update(false);
  off.restore(1024, 5);
  EXPECT_EQ(off.scale(), 1);
  on.restore(1024, 7);
  EXPECT_EQ(on.scale(), 1024);
  EXPECT_EQ(on.good_steps(), 7);
  LossScaler after_bf16({.enabled = true});
  after_bf16.restore(1, 0);  // the run so far had no scale
  EXPECT_EQ(after_bf16.scale(), 65536);
}

}  // namespace
}  // namespace kiln
