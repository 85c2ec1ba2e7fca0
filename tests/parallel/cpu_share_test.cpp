#include "parallel/cpu_share.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "parallel/rank_threads.h"
#include "test_files.h"

namespace kiln {
namespace {

RankCpus on(const std::string& host, int first, int count) {
  RankCpus rank{.host = host, .cpus = std::vector<int>(static_cast<size_t>(count))};
  std::iota(rank.cpus.begin(), rank.cpus.end(), first);
  return rank;
}

TEST(CpuShare, OneRankHasAllThatItMayUse) {
  ProcessGroup alone;
  EXPECT_EQ(cpu_share(alone), num_own_cpus());
}

TEST(CpuShare, RanksOfAMachineDivideWhatTheyShare) {
  for (size_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(cpu_share({on("a", 0, 64), on("a", 0, 64), on("b", 0, 64), on("b", 0, 64)}, rank), 32);
  EXPECT_EQ(cpu_share({on("a", 0, 2), on("a", 0, 2), on("a", 0, 2)}, 1), 1);
}

// srun and mpirun bind each task: to processors of its own, or to those of a socket.
TEST(CpuShare, WhatALauncherHasDividedIsNotDividedAgain) {
  EXPECT_EQ(cpu_share({on("a", 0, 8), on("a", 8, 8)}, 1), 8);
  EXPECT_EQ(cpu_share({on("a", 0, 32), on("a", 0, 32), on("a", 32, 32)}, 0), 16);
  EXPECT_EQ(cpu_share({on("a", 0, 32), on("a", 0, 32), on("a", 32, 32)}, 2), 32);
}

TEST(CpuShare, RanksTellEachOtherWhereTheyMayRun) {
  const int64_t all = num_own_cpus();
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    EXPECT_EQ(cpu_share(*group), std::max<int64_t>(1, all / 2));
  });
}

TEST(CpuShare, RanksOfAContainerDivideItsQuota) {
  RankCpus first = on("a", 0, 64), second = on("a", 0, 64);
  first.quota = second.quota = 8;
  EXPECT_EQ(cpu_share({first, second}, 0), 4);
  EXPECT_EQ(cpu_share({first}, 0), 8);
}

TEST(CpuShare, AQuotaIsRoundedUpAndAllowsNoMoreThanTheAffinity) {
  const TempFolder root;
  std::filesystem::create_directories(root / "proc/self");
  std::filesystem::create_directories(root / "sys/fs/cgroup");
  test::write_bytes(root / "proc/self/cgroup", "0::/\n");
  const auto with_quota = [&](const std::string& quota) {
    test::write_bytes(root / "sys/fs/cgroup/cpu.max", quota + " 100000\n");
    return num_own_cpus(root.path().string());
  };
  const int64_t allowed = num_own_cpus();
  EXPECT_EQ(with_quota("max"), with_quota("100000000"));
  EXPECT_GE(with_quota("max"), allowed) << "the test itself may have a quota";
  EXPECT_EQ(with_quota("30000"), 1);
  EXPECT_EQ(with_quota("130000"), std::min<int64_t>(2, with_quota("max")));
}

TEST(CpuShare, OwnProcessorsAreThoseOfTheAffinity) {
  std::thread([] {
    cpu_set_t set;
    ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    size_t first = 0;
    while (!CPU_ISSET(first, &set)) ++first;
    CPU_ZERO(&set);
    CPU_SET(first, &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
    EXPECT_EQ(num_own_cpus(), 1);
  }).join();
}

}  // namespace
}  // namespace kiln
