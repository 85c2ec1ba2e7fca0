// A loss with weights of its own: its gradients, how its state is divided, kept and resumed, and that no file
// of the model has it.
#include <ATen/ops/cosine_similarity.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "parallel/rank_threads.h"
#include "step/forward_pass.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/one_pass.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::gradients_of_step;
using test::one_pass_gradients;
using test::relative_error;
using test::rows_of;
using test::TinyOptions;
using test::TinyTraining;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kAlignWeight = 0.5;

TinyOptions aligned() {
  return {.accumulate_f32 = true, .objective = "epsilon", .align_weight = kAlignWeight};
}

std::vector<std::string> keys_of(const std::string& file) {
  std::vector<std::string> keys;
  for (const auto& [key, tensor] : load_tensors(file)) keys.push_back(key);
  return keys;
}

TEST(Head, GradientsAreThoseOfOnePassWhateverIsRecomputed) {
  using enum Activations;
  const TinyTraining tiny(aligned());
  const StepBatch batch = tiny.batch(6);
  const at::Tensor expected = one_pass_gradients(tiny, batch);
  at::Tensor kept;
  for (const Activations choice : {kKeep, kRecompute, kOffload}) {
    TinyOptions options = aligned();
    options.memory.assign(4, {choice});
    const TinyTraining run(options);
    const StepResult result = run.step->run(batch, 0);
    EXPECT_NEAR(result.loss, result.terms.at(0) + kAlignWeight * result.terms.at(1), 1e-5);
    const at::Tensor found = gradients_of_step(run);
    EXPECT_LE(relative_error(found, expected), 1e-5);
    if (!kept.defined()) kept = found;
    EXPECT_TRUE(at::equal(found, kept)) << "the same bits";
  }
}

TEST(Head, AddsUpOverMicroBatchesAndDividedRanks) {
  const TinyTraining tiny(aligned());
  const StepBatch batch = tiny.batch(7);
  const at::Tensor expected = one_pass_gradients(tiny, batch);
  for (const int64_t world_size : {1, 2, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage)
        for (const int64_t micro_batch : {0, 1, 3}) {
          TinyOptions options = aligned();
          options.micro_batch = micro_batch;
          options.group = group;
          options.zero.stage = stage;
          const TinyTraining run(options);
          run.step->run(rows_of(batch, *group), 0);
          EXPECT_LE(relative_error(gradients_of_step(run), expected), 1e-5)
              << world_size << " ranks, stage " << stage << ", micro-batches of " << micro_batch;
        }
    });
}

// One minus the cosine of what the head makes of each token with the patch at its place.
TEST(Head, AlignsTokensWithPatches) {
  const TinyTraining tiny(aligned());
  const at::NoGradGuard no_grad;
  const StepBatch batch = tiny.batch(3);
  NoisedBatch noised = tiny.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const at::Tensor tokens = at::randn({3, 16, 48});
  noised.taps = {tokens};
  const at::Tensor align = tiny.objective->loss(batch.noise, batch.x_0, batch.noise, noised).terms.at(1);
  at::Tensor projected = tokens;
  for (size_t layer = 0; layer < 3; ++layer) {
    const ParameterList& weights = tiny.objective->head()->parameters();
    if (layer > 0) projected = at::silu(projected);
    projected = at::linear(projected, weights[2 * layer]->value, weights[2 * layer + 1]->value);
  }
  at::Tensor cosines = at::zeros({3});
  for (int64_t row = 0; row < 4; ++row)
    for (int64_t column = 0; column < 4; ++column) {
      const at::Tensor patch = batch.x_0.narrow(2, 2 * row, 2).narrow(3, 2 * column, 2).flatten(1);
      const at::Tensor token = projected.select(1, 4 * row + column);
      cosines += at::cosine_similarity(token, patch, 1);
    }
  EXPECT_TRUE(at::allclose(align, 1 - cosines / 16, /*rtol=*/1e-5, /*atol=*/1e-6));
}

TEST(Head, HeldOutSamplesAreMeasuredWithoutIt) {
  const TinyTraining tiny(aligned()), plain({.objective = "epsilon"});
  EXPECT_THAT(tiny.objective->term_names(), ElementsAre("mse", "align"));
  const at::NoGradGuard no_grad;
  const StepBatch batch = tiny.batch(3);
  const auto losses = [&](const TinyTraining& training) {
    const NoisedBatch noised = training.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
    return training.objective->loss(batch.x_0, batch.x_0, batch.noise, noised).loss;
  };
  EXPECT_TRUE(at::equal(losses(tiny), losses(plain)));
}

// On any ranks and at any stage, with the state on a disk or not, a run goes on to the bits of the run that
// did not stop, and the head lies in a file of its own.
TEST(Head, ResumesFromAFileOfItsOwn) {
  const test::TempFolder folder;
  const auto step = [](const TinyTraining& tiny, int64_t number) {
    const StepBatch batch = tiny.batch(4, static_cast<uint64_t>(number));
    return tiny.step->run(rows_of(batch, tiny.state->zero->group()), 1e-3).loss;
  };
  TinyTraining alone(aligned());
  for (int64_t i = 0; i < 2; ++i) step(alone, i);
  const std::string saved = save_checkpoint(folder.path(), *alone.state, {.step = 2});
  std::vector<std::string> of_model;
  for (const auto& parameter : alone.denoiser->parameters()) of_model.push_back(parameter->key);
  EXPECT_THAT(keys_of(saved + "/model.safetensors"), ::testing::UnorderedElementsAreArray(of_model));
  EXPECT_THAT(keys_of(saved + "/ema.safetensors"), ::testing::UnorderedElementsAreArray(of_model));
  EXPECT_THAT(keys_of(saved + "/head.safetensors"),
              ElementsAre("projector.0.bias", "projector.0.weight", "projector.2.bias", "projector.2.weight",
                          "projector.4.bias", "projector.4.weight"));
  double expected = 0;
  for (int64_t i = 2; i < 5; ++i) expected = step(alone, i);
  for (const int64_t world_size : {1, 2})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const Placement placement : {Placement::kDevice, Placement::kNvme})
        for (int64_t stage = 0; stage <= 3; ++stage) {
          TinyOptions options =
              test::placed(aligned(), placement, stage == 3 ? placement : Placement::kDevice);
          options.group = group;
          options.zero.stage = stage;
          const TinyTraining tiny(options);
          step(tiny, 17);  // whatever it was before
          load_checkpoint(saved, *tiny.state);
          double loss = 0;
          for (int64_t i = 2; i < 5; ++i) loss = step(tiny, i);
          EXPECT_NEAR(loss / expected, 1, 5e-6) << world_size << " ranks, stage " << stage;
          if (world_size == 1) {
            EXPECT_EQ(loss, expected) << "stage " << stage;
          }
        }
    });
}

// The average takes the model's place and leaves the head as it is; another denoiser gets the model alone.
TEST(Head, HasNoAverageAndIsNotCopied) {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    TinyOptions options = aligned();
    options.zero.stage = stage;
    const TinyTraining watched(options), plain(options);
    const StepBatch batch = watched.batch(4);
    EXPECT_EQ(watched.step->run(batch, 1e-3).loss, plain.step->run(batch, 1e-3).loss);
    const FlatUnit& head = watched.state->segments.at(*watched.state->head()).unit;
    EXPECT_TRUE(head.emas.empty());
    const at::Tensor before = head.master.clone();
    with_first_ema(*watched.state, [&] {
      EXPECT_TRUE(at::equal(head.master, before));
      const ModelInput input{
          .x_t = batch.x_0, .timesteps = batch.timesteps.to(at::kFloat), .conditioning = batch.conditioning};
      EXPECT_EQ(forward_pass(*watched.denoiser, *watched.state->zero, input).size(0), 4);
    });
    const TinyTraining other({.objective = "epsilon"});
    copy_weights(*watched.state, WeightsKind::kMaster, 0, *other.denoiser);
    for (int64_t i = 0; i < 2; ++i)
      EXPECT_EQ(watched.step->run(batch, 1e-3).loss, plain.step->run(batch, 1e-3).loss) << "stage " << stage;
  }
}

TEST(Head, OfAModelWithoutTokensIsRefused) {
  TinyOptions options = aligned();
  options.has_skips = true;
  EXPECT_THAT(test::message_of([&] { const TinyTraining run(options); }),
              HasSubstr("--align-weight compares a token with each patch"));
}

}  // namespace
}  // namespace kiln
