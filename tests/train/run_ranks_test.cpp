#include "train/loop.h"

#include "parallel/rank_threads.h"
#include "test_files.h"

namespace kiln {
namespace {

struct RankSettings {
  TrainOptions options{};
  std::string build = "0.1.0+7c1e0a94b2d3";
  at::Device device = at::kCPU;
};

// What each of two ranks is told, when rank 1 differs by `change`.
std::vector<std::string> messages_of_two(const std::function<void(RankSettings&)>& change) {
  return test::errors_of_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    RankSettings settings;
    if (group->rank() == 1) change(settings);
    require_same_run(*group, settings.options, settings.build, settings.device);
  });
}

TEST(RunRanks, NamesMixedBuilds) {
  EXPECT_THAT(messages_of_two([](RankSettings& settings) { settings.build = "0.1.0+99f04b61aa05"; }),
              testing::Each("mixed versions or options among ranks: kiln is \"0.1.0+7c1e0a94b2d3\" on rank 0 "
                            "and \"0.1.0+99f04b61aa05\" on rank 1: start all ranks with the same command"));
}

TEST(RunRanks, NamesTheOptionThatDiffers) {
  EXPECT_THAT(messages_of_two([](RankSettings& settings) { settings.options.lr.peak = 0.5; }),
              testing::Each(HasSubstr("--lr is 0.0001 on rank 0 and 0.5 on rank 1")));
}

// --device auto where only one machine has a GPU.
TEST(RunRanks, NamesOtherKindsOfDevices) {
  EXPECT_THAT(messages_of_two([](RankSettings& settings) { settings.device = at::kCUDA; }),
              testing::Each(HasSubstr("the device (--device) is \"cpu\" on rank 0 and \"cuda\" on rank 1")));
}

TEST(RunRanks, MachinesMayDifferInWhatIsTheirOwn) {
  EXPECT_THAT(messages_of_two([](RankSettings& settings) {
                settings.options.data.path = "/elsewhere/store";
                settings.options.data.loader_threads = 7;
              }),
              testing::Each(""));
}

}  // namespace
}  // namespace kiln
