// What ends a run, and by whose clock.
#include "train/progress.h"

#include <gtest/gtest.h>

#include "train/usable_options.h"

namespace kiln {
namespace {

TEST(Progress, StepsAndSecondsBothEndARun) {
  TrainOptions options = test::usable_options();
  options.max_steps = 10;
  Progress by_steps(options);
  by_steps.resume(1e6);  // no time limit
  by_steps.step = 9;
  EXPECT_FALSE(by_steps.finished());
  EXPECT_DOUBLE_EQ(by_steps.share(), 0.9);
  by_steps.step = 10;
  EXPECT_TRUE(by_steps.finished());

  options.max_minutes = 2;
  Progress by_seconds(options);
  by_seconds.step = 3;
  by_seconds.agree(60);
  EXPECT_FALSE(by_seconds.finished());
  EXPECT_DOUBLE_EQ(by_seconds.share(), 0.5);  // further than the steps
  by_seconds.agree(120);
  EXPECT_TRUE(by_seconds.finished());
}

// The clocks of several ranks differ: none goes by its own, or one would stop alone.
TEST(Progress, OnlyTheSecondsThatRanksAgreedOnEndARun) {
  TrainOptions options = test::usable_options();
  options.max_minutes = 1;
  Progress progress(options);
  progress.resume(59);
  EXPECT_GE(progress.clock_seconds(), 59);
  EXPECT_EQ(progress.seconds(), 59) << "a clock moves";
  progress.resume(61);
  EXPECT_TRUE(progress.finished());
  progress.agree(30);
  EXPECT_FALSE(progress.finished());
}

}  // namespace
}  // namespace kiln
