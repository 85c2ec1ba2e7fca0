#include "checkpoint/train_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class TrainState : public ::testing::Test {
 protected:
  void SetUp() override {
    run_ = fs::path(::testing::TempDir()) / (std::string("kiln_train_state_") +
                                             ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(run_);
    fs::create_directories(run_);
  }
  void TearDown() override { fs::remove_all(run_); }

  fs::path write(int64_t step, const std::string& weights = "weights") {
    CheckpointWriter writer(run_, step);
    std::ofstream(fs::path(writer.folder()) / "model.safetensors") << weights;
    return writer.commit({.seed = 3, .step = step, .images_seen = 8 * step, .loss_scale = 2, .machine = "m"});
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    for (const Checkpoint& checkpoint : list_checkpoints(run_)) steps.push_back(checkpoint.step);
    return steps;
  }
  size_t num_entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(run_ / "checkpoints"), {}));
  }

  fs::path run_;
};

TEST_F(TrainState, ReadsBackWhatWasWritten) {
  const fs::path folder = write(1000);
  EXPECT_EQ(folder.filename(), "step-00001000");
  const TrainStateInfo info = read_train_state(folder);
  EXPECT_EQ(info.seed, 3u);
  EXPECT_EQ(info.step, 1000);
  EXPECT_EQ(info.images_seen, 8000);
  EXPECT_EQ(info.loss_scale, 2);
  EXPECT_EQ(info.machine, "m");
}

TEST_F(TrainState, ListsOnlyCompleteCheckpointsInOrder) {
  for (int64_t step : {20, 100, 3}) write(step);
  fs::create_directories(run_ / "checkpoints" / "step-00000500");
  fs::create_directories(run_ / "checkpoints" / "step-abc");
  fs::copy(run_ / "checkpoints" / "step-00000100", run_ / "checkpoints" / "step-101");
  EXPECT_EQ(steps(), (std::vector<int64_t>{3, 20, 100}));
  std::ofstream(run_ / "checkpoints" / "step-00000100" / "model.safetensors") << "torn";
  EXPECT_EQ(steps(), (std::vector<int64_t>{3, 20}));
  fs::remove(run_ / "checkpoints" / "step-00000020" / "model.safetensors");
  EXPECT_EQ(steps(), (std::vector<int64_t>{3}));
  std::ofstream(run_ / "checkpoints" / "step-00000003" / "train_state.json") << "{";
  EXPECT_TRUE(steps().empty());
  EXPECT_TRUE(list_checkpoints(run_ / "absent").empty());
}

TEST_F(TrainState, SaysWhatIsWrongWithDamagedOnes) {
  for (int64_t step : {1, 2, 3, 4, 5}) write(step);
  EXPECT_TRUE(damaged_checkpoints(run_).empty());
  EXPECT_TRUE(damaged_checkpoints(run_ / "absent").empty());
  const fs::path folder = run_ / "checkpoints";
  std::ofstream(folder / "step-00000001" / "model.safetensors") << "torn";
  fs::remove(folder / "step-00000002" / "model.safetensors");
  std::ofstream(folder / "step-00000003" / "train_state.json") << "{";
  std::ofstream(folder / "step-00000004" / "train_state.json") << R"({"format_version": 7, "files": {}})";
  fs::create_directories(folder / ".partial-step-00000009");
  const std::string name = folder.string();
  EXPECT_THAT(damaged_checkpoints(run_),
              ::testing::UnorderedElementsAre(
                  "model.safetensors of " + name + "/step-00000001 has 4 bytes, expected 7",
                  name + "/step-00000002 lacks model.safetensors",
                  name + "/step-00000003/train_state.json is not a JSON object",
                  name + "/step-00000004 has format_version 7, expected 1"));
  EXPECT_EQ(steps(), (std::vector<int64_t>{5}));
}

TEST_F(TrainState, AnAbandonedWriterLeavesNothing) {
  write(1);
  {
    CheckpointWriter writer(run_, 2);
    std::ofstream(fs::path(writer.folder()) / "model.safetensors") << "half";
    EXPECT_EQ(num_entries(), 2u);
    EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
  }
  EXPECT_EQ(num_entries(), 1u);
}

TEST_F(TrainState, PruningKeepsTheNewestAndRemovesLeftovers) {
  for (int64_t step = 1; step <= 5; ++step) write(step);
  fs::create_directories(run_ / "checkpoints" / ".partial-step-00000006");
  prune_checkpoints(run_, 0);
  EXPECT_EQ(num_entries(), 5u);
  prune_checkpoints(run_, 2);
  EXPECT_EQ(steps(), (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(num_entries(), 2u);
}

TEST_F(TrainState, ACheckpointOfTheSameStepIsReplaced) {
  write(1, "old");
  const fs::path folder = write(1, "new weights");
  EXPECT_EQ(fs::file_size(folder / "model.safetensors"), 11u);
  EXPECT_EQ(num_entries(), 1u);
}

TEST_F(TrainState, ErrorsNameTheFile) {
  const fs::path folder = write(1);
  std::ofstream(folder / "train_state.json") << "{\"step\": 1}";
  EXPECT_THAT([&] { read_train_state(folder); }, ThrowsMessage<Error>(HasSubstr("train_state.json")));
  EXPECT_THAT([&] { read_train_state(run_ / "absent"); }, ThrowsMessage<Error>(HasSubstr("cannot read")));
  std::ofstream(run_ / "file") << "";
  EXPECT_THAT([&] { CheckpointWriter(run_ / "file", 1); }, ThrowsMessage<Error>(HasSubstr("cannot create")));
}

TEST(CheckpointNames, ArePublished) {
  EXPECT_EQ(checkpoint_name(1000), "step-00001000");
  EXPECT_EQ(checkpoint_name(123456789), "step-123456789");
  EXPECT_EQ(ema_file_name({0.9999, 0.999}, 0), "ema.safetensors");
  EXPECT_EQ(ema_file_name({0.9999, 0.999}, 1), "ema-0.999.safetensors");
  EXPECT_EQ(checkpoint_folder("run", 7), "run/checkpoints/step-00000007");
}

}  // namespace
}  // namespace kiln
