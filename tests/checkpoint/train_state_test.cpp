#include "checkpoint/train_state.h"

#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class TrainState : public ::testing::Test {
 protected:
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

  test::TempFolder folder_;
  const fs::path run_ = folder_.path();
  std::string warnings_;
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
  EXPECT_THAT(
      damaged_checkpoints(run_),
      ::testing::UnorderedElementsAre(
          "model.safetensors of " + name + "/step-00000001 has 4 bytes, expected 7",
          name + "/step-00000002 lacks model.safetensors",
          name + "/step-00000003/train_state.json is not a JSON object",
          name + "/step-00000004 has format_version 7, expected 1: another version of Kiln wrote it"));
  EXPECT_EQ(steps(), (std::vector<int64_t>{5}));
}

void flip_byte(const fs::path& path, size_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(position));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(position));
  file.put(static_cast<char>(byte ^ 1));
}

TEST_F(TrainState, AFlippedByteOfItIsDamage) {
  const fs::path folder = write(1), path = folder / "train_state.json";
  const std::string text = read_bytes(path);
  for (const char* value : {"\"images_seen\": ", "\"seed\": ", "\"xxh3\": \""}) {
    const size_t position = text.find(value) + std::string(value).size();
    ASSERT_LT(position, text.size());
    flip_byte(path, position);
    EXPECT_TRUE(steps().empty()) << value;
    EXPECT_ERROR(read_train_state(folder), "train_state.json has other bytes than were written");
    flip_byte(path, position);
  }
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

// A file and its checksum; another one that nobody has added up.
fs::path write_checked(const fs::path& run, int64_t step, const std::string& weights) {
  CheckpointWriter writer(run, step);
  std::ofstream(fs::path(writer.folder()) / "model.safetensors") << weights;
  std::ofstream(fs::path(writer.folder()) / "notes") << "any";
  FileChecksum checksum;
  checksum.add(0, std::as_bytes(std::span(weights)));
  return writer.commit({.step = step}, {{"model.safetensors", checksum}});
}

TEST_F(TrainState, TellsTheChecksumsOfItsFiles) {
  const fs::path folder = write_checked(run_, 1, "weights");
  const std::vector<CheckpointFile> files = read_file_list(folder);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].name, "model.safetensors");
  EXPECT_EQ(files[0].bytes, 7u);
  const FileChecksum found = checksum_of_bytes(folder / "model.safetensors", 0, 7);
  EXPECT_EQ(files[0].checksum, found.of_file(7));
  EXPECT_EQ(files[1].checksum, "");
  EXPECT_EQ(damage_of(folder, files[0], found), "");
  EXPECT_EQ(damage_of(folder, files[1], found), "");
  flip_byte(folder / "model.safetensors", 6);
  EXPECT_EQ(damage_of(folder, files[0], checksum_of_bytes(folder / "model.safetensors", 0, 7)),
            "model.safetensors of " + folder.string() + " has other bytes than were written");
}

TEST_F(TrainState, AReaderOfOneFileTakesTheNewestThatIsWhole) {
  const auto find = [&](const std::string& name) {
    return newest_checked_file(run_, [&](const std::string& folder) { return folder + "/" + name; });
  };
  const auto newest = [&](const std::string& name) {
    std::string path;
    warnings_ = stderr_of([&] { path = find(name); });
    return path;
  };
  EXPECT_EQ(newest("model.safetensors"), "");
  const fs::path first = write_checked(run_, 1, "weights"), second = write_checked(run_, 2, "weights");
  EXPECT_EQ(newest("model.safetensors"), second / "model.safetensors");
  EXPECT_EQ(warnings_, "");
  flip_byte(second / "model.safetensors", 0);
  EXPECT_EQ(newest("model.safetensors"), first / "model.safetensors");
  EXPECT_EQ(warnings_, "warning: passed over, it is damaged: model.safetensors of " + second.string() +
                           " has other bytes than were written\n");
  EXPECT_EQ(newest("notes"), second / "notes");  // of which nothing is known
  flip_byte(first / "model.safetensors", 0);
  EXPECT_ERROR(find("model.safetensors"),
               "none of the 2 checkpoints of " + run_.string() + " is whole: model.safetensors of");
}

// Another start, or another machine, may see it.
TEST_F(TrainState, WhatCannotBeReadIsNoDamage) {
  for (const int64_t step : {1, 2}) write(step);
  const fs::path state = fs::path(list_checkpoints(run_).back().folder) / "train_state.json";
  fs::remove(state);
  fs::create_symlink(state, state);  // too many levels of symbolic links
  EXPECT_ERROR(list_checkpoints(run_), "cannot read " + state.string());
  fs::remove(state);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
  EXPECT_EQ(damaged_checkpoints(run_).size(), 1u);
  fs::remove_all(run_ / "checkpoints");
  EXPECT_TRUE(list_checkpoints(run_).empty());
  std::ofstream(run_ / "checkpoints") << "a file";
  EXPECT_ERROR(list_checkpoints(run_), "checkpoints: Not a directory");
}

TEST_F(TrainState, WhatIsSetAsideIsNoCheckpointAndStays) {
  for (const int64_t step : {1, 2}) write(step);
  const std::string aside = set_aside(list_checkpoints(run_).back());
  EXPECT_EQ(fs::path(aside).filename(), "damaged-step-00000002");
  write(2);
  EXPECT_EQ(fs::path(set_aside(list_checkpoints(run_).back())).filename(), "damaged-step-00000002-2");
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
  EXPECT_TRUE(damaged_checkpoints(run_).empty());
  prune_checkpoints(run_, 1);
  EXPECT_TRUE(fs::exists(aside + "/model.safetensors"));
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
  EXPECT_ERROR(read_train_state(folder), "train_state.json");
  EXPECT_ERROR(read_train_state(run_ / "absent"), "cannot read");
  std::ofstream(run_ / "file") << "";
  EXPECT_ERROR(CheckpointWriter(run_ / "file", 1), "cannot create");
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
