// Friction 5 and 6 of a new user: a busy machine is named with how much of it others have.
#include "parallel/cpu_share.h"

#include <gtest/gtest.h>

#include "parallel/busy_processor.h"

namespace kiln {
namespace {

TEST(ProcessorUse, OthersHadWhatWasWaitedForAndIsMissing) {
  EXPECT_DOUBLE_EQ(taken_share({.wall = 10, .running = 8, .waiting = 12}, 2), 0.6);
  EXPECT_DOUBLE_EQ(taken_share({.wall = 10, .running = 10, .waiting = 0}, 4), 0) << "one thread worked";
  EXPECT_DOUBLE_EQ(taken_share({.wall = 10, .running = 20, .waiting = 15}, 2), 0) << "it waited for itself";
  EXPECT_DOUBLE_EQ(taken_share({.wall = 10, .running = 21, .waiting = 1}, 2), 0);
  EXPECT_DOUBLE_EQ(taken_share({.wall = 10, .running = 1, .waiting = -1}, 2), 0) << "a thread has ended";
  EXPECT_DOUBLE_EQ(taken_share({}, 2), 0);
}

TEST(ProcessorUse, MoreThreadsOrRanksThanProcessorsAreNoOthers) {
  EXPECT_DOUBLE_EQ(processors_of(1), 1);
  EXPECT_DOUBLE_EQ(processors_of(1000), static_cast<double>(num_own_cpus()));
  const double processors = processors_of(/*threads=*/1, /*ranks=*/4 * num_own_cpus());
  EXPECT_DOUBLE_EQ(processors, 0.25);
  EXPECT_DOUBLE_EQ(taken_share({.wall = 8, .running = 2, .waiting = 6}, processors), 0) << "ranks took turns";
  EXPECT_DOUBLE_EQ(taken_share({.wall = 8, .running = 1, .waiting = 7}, processors), 0.5) << "others came in";
}

TEST(ProcessorUse, TheTextSaysHowMuch) {
  EXPECT_EQ(taken_text(0.09), "");
  EXPECT_EQ(taken_text(0.434), "other programs had 43 % of the processors' time");
}

TEST(ProcessorUse, AProgramOnTheSameProcessorIsSeen) {
  if (!test::system_counts_waiting()) GTEST_SKIP() << "the system does not say";
  const test::BusyProcessor busy;
  const ProcessorTimes before = processor_times();
  ProcessorTimes spent;
  while (spent.wall < 0.5) spent = processor_times().since(before);
  EXPECT_GT(taken_share(spent, 1), 0.25);
}

}  // namespace
}  // namespace kiln
