#include "parallel/offload/state_placement.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

constexpr StatePlacement kHostAndDisk{.optimizer = Placement::kHost, .params = Placement::kNvme};

TEST(StatePlacement, HostMemoryIsTheMemoryOfACpu) {
  const StatePlacement on_cpu = kHostAndDisk.on(/*device_has_host=*/false);
  EXPECT_EQ(on_cpu, (StatePlacement{.params = Placement::kNvme}));
  EXPECT_FALSE(on_cpu.updates_on_host());
  EXPECT_FALSE(on_cpu.gathers_from_host());
  EXPECT_TRUE(on_cpu.uses_disk());
  EXPECT_FALSE(on_cpu.is_on_device());
  EXPECT_TRUE(on_cpu.at_stage(2).is_on_device());
}

TEST(StatePlacement, TheHostOfAGpuUpdatesWhatItKeeps) {
  const StatePlacement on_gpu = kHostAndDisk.on(/*device_has_host=*/true);
  EXPECT_TRUE(on_gpu.updates_on_host());
  EXPECT_TRUE(on_gpu.gathers_from_host());
  EXPECT_EQ(on_gpu.at_stage(3), on_gpu);
  EXPECT_TRUE(on_gpu.at_stage(2).updates_on_host());
  EXPECT_FALSE(on_gpu.at_stage(2).gathers_from_host());  // weights are whole
  EXPECT_FALSE(on_gpu.at_stage(2).uses_disk());
  EXPECT_TRUE(StatePlacement().on(true).is_on_device());
  EXPECT_FALSE(StatePlacement().on(true).updates_on_host());
}

}  // namespace
}  // namespace kiln
