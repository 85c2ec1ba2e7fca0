// The segment walk against one autograd pass over the whole model: the same bits.
#include "train/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "train/tiny_model.h"

namespace kiln {
namespace {

using test::TinyTraining;

std::vector<at::Tensor> grads_of(const TinyTraining& tiny) {
  std::vector<at::Tensor> grads;
  for (const auto& segment : tiny.state->segments) grads.push_back(segment.unit.grads.clone());
  return grads;
}

// d(mean loss) / d(weights) in one autograd pass, in the order of Denoiser::parameters().
std::vector<at::Tensor> plain_autograd(const TinyTraining& tiny, const StepBatch& batch) {
  at::AutoGradMode with_graph(true);
  const NoisedBatch noised = tiny.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const at::Tensor prediction = tiny.denoiser->forward(
      {.x_t = noised.x_t, .timesteps = noised.model_t, .class_labels = batch.class_labels});
  const LossTerms loss = tiny.objective->loss(prediction, batch.x_0, batch.noise, noised);
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : tiny.denoiser->parameters())
    if (parameter->trainable) leaves.push_back(parameter->value);
  return torch::autograd::grad({loss.loss.sum() * (1.0 / static_cast<double>(batch.size()))}, leaves);
}

std::vector<MemoryChoice> memory(size_t num_segments, const std::function<bool(size_t)>& recompute) {
  std::vector<MemoryChoice> choices(num_segments);
  for (size_t i = 0; i < num_segments; ++i)
    if (recompute(i)) choices[i].activations = Activations::kRecompute;
  return choices;
}

class Walk : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Walk, EqualsPlainAutogradBitwise) {
  TinyTraining tiny({.compute_dtype = GetParam()});
  const StepBatch batch = tiny.batch(6);
  const std::vector<at::Tensor> expected = plain_autograd(tiny, batch);
  const size_t num_segments = tiny.denoiser->segments().size();
  for (const auto& recompute : std::vector<std::function<bool(size_t)>>{
           [](size_t) { return false; }, [](size_t) { return true; }, [](size_t i) { return i % 2 == 1; },
           [](size_t i) { return i == 0; }}) {
    TinyTraining run({.compute_dtype = GetParam(), .memory = memory(num_segments, recompute)});
    const StepResult result = run.step->run(batch, /*lr=*/0);
    EXPECT_TRUE(result.applied);
    size_t next = 0;
    for (const auto& segment : run.state->segments)
      for (size_t i = 0; i < segment.parameters.size(); ++i, ++next)
        EXPECT_TRUE(at::equal(segment.grad_views[i], expected[next])) << segment.parameters[i]->key;
    EXPECT_EQ(next, expected.size());
  }
}

INSTANTIATE_TEST_SUITE_P(ComputeDtypes, Walk, ::testing::Values(at::kFloat, at::kBFloat16));

TEST(Step, RecomputeTrainsTheSameWeightsBitwise) {
  TinyTraining keep({}), recompute({.memory = memory(4, [](size_t) { return true; })});
  for (int64_t step = 0; step < 5; ++step) {
    const StepBatch batch = keep.batch(4, step);
    EXPECT_EQ(keep.step->run(batch, 1e-3).loss, recompute.step->run(batch, 1e-3).loss);
  }
  for (size_t s = 0; s < keep.state->segments.size(); ++s) {
    EXPECT_TRUE(at::equal(keep.state->segments[s].unit.master, recompute.state->segments[s].unit.master));
    EXPECT_TRUE(at::equal(keep.state->segments[s].unit.emas[0], recompute.state->segments[s].unit.emas[0]));
  }
}

// The loss is the mean over the global batch, whatever it is cut into; the last micro-batch may be smaller.
TEST(Step, MicroBatchesAddUpToTheGlobalMean) {
  TinyTraining whole({.accumulate_f32 = true});
  const StepBatch batch = whole.batch(8);
  const StepResult expected = whole.step->run(batch, 0);
  const std::vector<at::Tensor> expected_grads = grads_of(whole);
  for (int64_t micro_batch : {1, 2, 3, 5}) {
    TinyTraining run({.accumulate_f32 = true, .micro_batch = micro_batch});
    const StepResult result = run.step->run(batch, 0);
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss);
    EXPECT_NEAR(result.grad_norm, expected.grad_norm, 1e-5 * expected.grad_norm);
    ASSERT_EQ(result.losses.size(), 8u);
    const std::vector<at::Tensor> grads = grads_of(run);
    for (size_t s = 0; s < grads.size(); ++s)
      EXPECT_LE((grads[s] - expected_grads[s]).norm().item<double>(),
                1e-5 * expected_grads[s].norm().item<double>() + 1e-9);
  }
}

TEST(Step, NonFiniteLossMovesNothing) {
  TinyTraining tiny({});
  tiny.step->run(tiny.batch(4, 0), 1e-3);
  std::vector<std::vector<at::Tensor>> before;
  for (const auto& segment : tiny.state->segments) {
    const FlatUnit& unit = segment.unit;
    before.push_back(
        {unit.master.clone(), unit.moments[0].clone(), unit.moments[1].clone(), unit.emas[0].clone()});
  }
  StepBatch batch = tiny.batch(4, 1);
  batch.x_0.select(0, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  const StepResult result = tiny.step->run(batch, 1e-3);
  EXPECT_FALSE(result.applied);
  EXPECT_TRUE(std::isfinite(result.losses[1]));
  EXPECT_FALSE(std::isfinite(result.losses[2]));
  EXPECT_EQ(tiny.state->updates, 1);
  for (size_t s = 0; s < before.size(); ++s) {
    const FlatUnit& unit = tiny.state->segments[s].unit;
    EXPECT_TRUE(at::equal(unit.master, before[s][0]));
    EXPECT_TRUE(at::equal(unit.moments[0], before[s][1]));
    EXPECT_TRUE(at::equal(unit.moments[1], before[s][2]));
    EXPECT_TRUE(at::equal(unit.emas[0], before[s][3]));
  }
  EXPECT_TRUE(tiny.step->run(tiny.batch(4, 2), 1e-3).applied);
}

TEST(Step, ClipsByTheGlobalNorm) {
  TinyTraining free({}), clipped({.max_grad_norm = 1e-3});
  const StepBatch batch = free.batch(4);
  const StepResult a = free.step->run(batch, 1e-3), b = clipped.step->run(batch, 1e-3);
  EXPECT_EQ(a.grad_norm, b.grad_norm);  // reported before clipping
  EXPECT_GT(a.grad_norm, 1e-2);
  const auto first_moment_norm = [](const TinyTraining& tiny) {
    double sum = 0;
    for (const auto& segment : tiny.state->segments)
      sum += segment.unit.moments[0].square().sum().item<double>();
    return std::sqrt(sum);
  };
  EXPECT_NEAR(first_moment_norm(free), 0.1 * a.grad_norm, 1e-5 * a.grad_norm);
  EXPECT_NEAR(first_moment_norm(clipped), 0.1 * 1e-3, 1e-6);
}

TEST(Step, RunsOnMeta) {
  TinyTraining tiny({.device = at::kMeta, .micro_batch = 2});
  const StepBatch batch = tiny.batch(4);
  EXPECT_NO_THROW(tiny.step->run(batch, 1e-3));
  EXPECT_TRUE(tiny.state->segments[0].unit.master.is_meta());
}

TEST(Step, NeedsAMemoryChoicePerSegment) {
  EXPECT_THROW(TinyTraining({.memory = std::vector<MemoryChoice>(2)}), Error);
}

}  // namespace
}  // namespace kiln
