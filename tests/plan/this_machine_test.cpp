#include "plan/price/this_machine.h"

#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "plan/price/attention_engine.h"

namespace kiln {
namespace {

using ::testing::Eq, ::testing::Optional;

// What nvidia-smi -L calls them.
TEST(ThisMachine, ProfilesOfGpusByTheirDriversNames) {
  const std::vector<std::pair<std::string, std::string>> profiles = {
      {"NVIDIA A100-SXM4-40GB", "A100-40G"},
      {"NVIDIA A100-SXM4-80GB", "A100-80G"},
      {"NVIDIA A100-PCIE-40GB", "A100-40G"},
      {"NVIDIA A100 80GB PCIe", "A100-80G"},
      {"NVIDIA A800-SXM4-80GB", "A800-80G"},
      {"NVIDIA A800 80GB PCIe", "A800-80G"},
      {"NVIDIA H100 80GB HBM3", "H100"},
      {"NVIDIA H100 PCIe", "H100"},
      {"NVIDIA H100 NVL", "H100"},
      {"NVIDIA H200", "H200"},
      {"NVIDIA B200", "B200"},
      {"Tesla T4", "T4"},
      {"Tesla V100-SXM2-16GB", "V100"},
      {"Tesla V100-SXM2-32GB", "V100"},
      {"NVIDIA L40S", "L40S"},
      {"NVIDIA A40", "A40"},
      {"NVIDIA GeForce RTX 3090", "RTX-3090"},
      {"NVIDIA GeForce RTX 4090", "RTX-4090"},
  };
  for (const auto& [name, profile] : profiles)
    EXPECT_THAT(builtin_profile_named(name), Optional(profile)) << name;
}

TEST(ThisMachine, ACalibratedGpuTakesTheAttentionOfItsKind) {
  MachineProfile profile;
  profile.peak_flops = {{at::kFloat, 1e12}, {at::kBFloat16, 1e12}};
  ComputeOptions compute{.dtype = at::kBFloat16};
  for (const char* name : {"H100", "H200", "B200", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"}) {
    profile.name = name;
    EXPECT_STREQ(attention_engine_of(profile, compute), "cudnn") << name;
  }
  for (const char* name : {"A100-80G", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "cpu"}) {
    profile.name = name;
    EXPECT_STREQ(attention_engine_of(profile, compute), "flash") << name;
  }
  profile.name = "H200";
  compute.deterministic = true;
  EXPECT_STREQ(attention_engine_of(profile, compute), "flash");
  compute.dtype = at::kFloat;
  EXPECT_STREQ(attention_engine_of(profile, compute), "memory-efficient");
  compute.dtype = at::kHalf;
  profile.peak_flops.erase(at::kBFloat16);
  EXPECT_STREQ(attention_engine_of(profile, compute), "memory-efficient") << "before Ampere";
}

TEST(ThisMachine, OtherGpusHaveNoProfile) {
  for (const std::string name : {"NVIDIA T400 4GB", "NVIDIA H20", "NVIDIA L40", "NVIDIA A4000",
                                 "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 3080", "GPU", ""})
    EXPECT_THAT(builtin_profile_named(name), Eq(std::nullopt)) << name;
}

TEST(ThisMachine, EveryGpuOfTheMachineIsPlannedWhereTheBatchAllowsIt) {
  EXPECT_EQ(planned_gpus(8, 256), 8);
  EXPECT_EQ(planned_gpus(8, 12), 6);
  EXPECT_EQ(planned_gpus(6, 256), 4);
  EXPECT_EQ(planned_gpus(8, 1), 1);
  EXPECT_EQ(planned_gpus(1, 256), 1);
}

TEST(ThisMachine, TheDataSheetIsTheBuiltInFigure) {
  EXPECT_EQ(data_sheet_flops("NVIDIA H200", at::kBFloat16, false), 989e12);
  EXPECT_EQ(data_sheet_flops("H200", at::kFloat, true), 495e12);
  EXPECT_EQ(data_sheet_flops("NVIDIA A100-SXM4-80GB", at::kHalf, false), 312e12);
  EXPECT_EQ(data_sheet_flops("Tesla T4", at::kBFloat16, false), 0) << "has none";
  EXPECT_EQ(data_sheet_flops("AMD EPYC", at::kBFloat16, false), 0);
  EXPECT_EQ(data_sheet_flops(at::kCPU, at::kFloat, false), 0);
}

}  // namespace
}  // namespace kiln
