// RUN/config.json and the choice of a run's weights.
#include "models/model_record.h"

#include "checkpoint/train_state.h"
#include "models/weights_source.h"
#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class Run : public ::testing::Test {
 protected:
  void SetUp() override {
    info_ = {.model = "DiT-S/2",
             .model_config = {{"input_size", 32}},
             .objective = {{"type", "flow"}},
             .image_size = 256,
             .autoencoder = {.name = "autoencoder_kl",
                             .path = "vae",
                             .fingerprint = "xxh3:1",
                             .scaling_factor = 0.18215,
                             .shift_factor = 0.5},
             .class_names = {"cat", "dog"},
             .ema_decays = {0.9999, 0.999}};
  }

  void write_checkpoint(int64_t step) {
    CheckpointWriter writer(run_.string(), step);
    for (const char* name : {"model.safetensors", "ema.safetensors", "ema-0.999.safetensors"})
      std::ofstream(fs::path(writer.folder()) / name) << "weights";
    TrainStateInfo state;
    state.step = step;
    writer.commit(state);
  }

  test::TempFolder folder_;
  fs::path run_ = folder_.path();
  ModelRecord info_;
};

TEST_F(Run, ReadsWhatWasWritten) {
  write_run_info(run_.string(), info_);
  const ModelRecord read = read_run_info(run_.string());
  EXPECT_EQ(read.model, info_.model);
  EXPECT_EQ(read.model_config, info_.model_config);
  EXPECT_EQ(read.objective, info_.objective);
  EXPECT_EQ(read.image_size, 256);
  EXPECT_EQ(read.autoencoder.name, "autoencoder_kl");
  EXPECT_EQ(read.autoencoder.path, "vae");
  EXPECT_EQ(read.autoencoder.fingerprint, "xxh3:1");
  EXPECT_EQ(read.autoencoder.scaling_factor, 0.18215);
  EXPECT_EQ(read.autoencoder.shift_factor, 0.5);
  EXPECT_EQ(read.class_names, info_.class_names);
  EXPECT_EQ(read.ema_decays, info_.ema_decays);
}

TEST_F(Run, BrokenConfigsNameTheFile) {
  EXPECT_ERROR(read_run_info(run_.string()), "not the folder of a training run");
  std::ofstream(run_ / "config.json") << R"({"model": "DiT-S/2"})";
  EXPECT_ERROR(read_run_info(run_.string()), "model_config");
  std::ofstream(run_ / "config.json") << "{";
  EXPECT_ERROR(read_run_info(run_.string()), "config.json");
}

TEST_F(Run, WeightsOfTheNewestCheckpoint) {
  write_run_info(run_.string(), info_);
  std::ofstream(run_ / "log.jsonl") << "{}";
  const auto chosen = [&](const WeightsChoice& choice) { return find_weights(run_.string(), choice).path; };
  EXPECT_ERROR(chosen({}), "no complete checkpoint");
  write_checkpoint(100);
  write_checkpoint(2000);
  EXPECT_THAT(chosen({}), EndsWith("step-00002000/ema.safetensors"));
  EXPECT_THAT(chosen({.ema_decay = 0.9999}), EndsWith("step-00002000/ema.safetensors"));
  EXPECT_THAT(chosen({.ema_decay = 0.999}), EndsWith("step-00002000/ema-0.999.safetensors"));
  EXPECT_THAT(chosen({.ema = false}), EndsWith("step-00002000/model.safetensors"));
  EXPECT_ERROR(chosen({.ema_decay = 0.5}), "0.9999, 0.999");
}

}  // namespace
}  // namespace kiln
