// Defects of other trainers that Kiln must not have: one test each.

#include <limits>

#include "checkpoint/safetensors.h"
#include "issues/one_weight.h"
#include "parallel/rank_threads.h"
#include "run_log_lines.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "watch/monitor.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using test::OneWeightTraining;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// PixArt-sigma, and a version of Sana: zero_grad inside accumulate() erases the gradients of earlier
// micro-batches.
TEST(Issues, AccumulationOfGradients1And10MovesBy5Point5) {
  OneWeightTraining training(/*micro_batch=*/1);
  const StepResult result = training.run({1, 10}, /*lr=*/1);
  EXPECT_DOUBLE_EQ(result.grad_norm, 5.5);
  EXPECT_DOUBLE_EQ(training.weight(), -5.5);
}

// diffusers#3954 and others: a mean of means weighs a smaller last micro-batch too much.
TEST(Issues, AnUnevenLastMicroBatchCountsBySize) {
  OneWeightTraining training(/*micro_batch=*/2);
  training.run({3, 6, 12}, /*lr=*/1);
  EXPECT_DOUBLE_EQ(training.weight(), -7);
}

// PixArt-sigma: the logged loss is one rank's, divided by the number of ranks. Ours is the mean of the global
// batch, whose rows the ranks may not even share evenly.
TEST(Issues, TheLoggedLossIsTheMeanOfTheGlobalBatch) {
  for (const int64_t world_size : {1, 2}) {
    const test::TempFolder run;
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      OneWeightTraining training(/*micro_batch=*/1, group);
      training.run({1, 1}, /*lr=*/-1);  // weight 1
      const StepResult result = training.run({2, 4, 9}, /*lr=*/0);
      EXPECT_DOUBLE_EQ(result.loss, 5);
      EXPECT_EQ(result.losses, (std::vector<double>{2, 4, 9}));
      if (group->rank() > 0) return;  // only the first one writes
      Monitor monitor({.run = run.path(), .global_batch = 3, .max_steps = 1, .tensorboard = false}, 0);
      monitor.step(
          {.step = 1, .is_last = true, .images_seen = 3, .result = &result, .positions = {0.1, 0.2, 0.9}});
    });
    const nlohmann::json line = test::run_log_lines(run.path()).at(0);
    EXPECT_EQ(line["loss"], 5.0) << world_size;
    EXPECT_EQ(line["loss_quartiles"], nlohmann::json({3.0, nullptr, nullptr, 9.0})) << world_size;
  }
}

// Sana, PixArt-sigma: the EMA advances on steps that the gradient scaler skipped.
TEST(Issues, SkippedStepsMoveNeitherWeightsNorEma) {
  OneWeightTraining training(/*micro_batch=*/1);
  training.run({2}, /*lr=*/-1);
  EXPECT_DOUBLE_EQ(training.weight(), 2);
  EXPECT_DOUBLE_EQ(training.ema(), 1);
  EXPECT_FALSE(training.run({1, kNan}, /*lr=*/-1).applied);
  EXPECT_DOUBLE_EQ(training.weight(), 2);
  EXPECT_DOUBLE_EQ(training.ema(), 1);
  EXPECT_EQ(training.state->updates, 1);
  EXPECT_TRUE(training.run({0}, /*lr=*/-1).applied);
  EXPECT_DOUBLE_EQ(training.ema(), 1.5);
}

// DiT: saving asks for model.module, which one device has not; keys with or without a prefix depend on the
// launch. PixArt-sigma: an EMA is configured but never created.
TEST(Issues, SavingWorksOnOneDeviceInPublishedKeysWithEveryEma) {
  const test::TempFolder run;
  OneWeightTraining training(/*micro_batch=*/0);
  training.run({4}, /*lr=*/-1);
  const fs::path folder = save_checkpoint(run.path(), *training.state, {.step = 1});
  for (const auto& [file, value] : {std::pair{"model.safetensors", 4.0f}, {"ema.safetensors", 2.0f}}) {
    const auto tensors = open_safetensors(folder / file);
    ASSERT_EQ(tensors->tensors().size(), 1u);
    const TensorView& weight = tensors->tensors().at("weight");
    EXPECT_EQ(weight.dtype, Dtype::kF32);
    EXPECT_EQ(*reinterpret_cast<const float*>(weight.bytes.data()), value);
  }
}

// DiT#35, DiT#23: no resume at all, or one that forgets the EMA, the optimizer or the loss scale.
TEST(Issues, ResumeRestoresEverythingThatTrainingMoves) {
  const test::TempFolder run;
  OneWeightTraining first(/*micro_batch=*/0), second(/*micro_batch=*/0);
  first.run({4}, /*lr=*/-1);
  first.run({kNan}, /*lr=*/-1);
  const std::string folder = save_checkpoint(run.path(), *first.state, {.step = 2, .images_seen = 2});
  const TrainStateInfo info = load_checkpoint(folder, *second.state);
  EXPECT_EQ(info.images_seen, 2);
  EXPECT_EQ(second.state->updates, 1);  // the count of Adam's bias correction, not of steps
  EXPECT_EQ(second.weight(), first.weight());
  EXPECT_EQ(second.ema(), first.ema());
}

}  // namespace
}  // namespace kiln
