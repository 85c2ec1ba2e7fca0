// The segment walk against one autograd pass over the whole model: the same bits.
#include "step/step.h"
#include "core/aten.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "core/allocations.h"
#include "core/dry_run.h"
#include "parallel/rank_threads.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::expect_equal, test::state_of, test::TinyOptions, test::TinyTraining;

std::vector<at::Tensor> grads_of(const TinyTraining& tiny) {
  std::vector<at::Tensor> grads;
  for (const auto& segment : tiny.state->segments) grads.push_back(segment.unit.grads.clone());
  return grads;
}

// Of the whole batch at once.
LossTerms plain_loss(const TinyTraining& tiny, const StepBatch& batch) {
  const NoisedBatch noised = tiny.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const at::Tensor prediction = tiny.denoiser->forward(
      {.x_t = noised.x_t, .timesteps = noised.model_t, .conditioning = batch.conditioning});
  return tiny.objective->loss(prediction, batch.x_0, batch.noise, noised);
}

// d(mean loss) / d(weights) in one autograd pass, in the order of Denoiser::parameters().
std::vector<at::Tensor> plain_autograd(const TinyTraining& tiny, const StepBatch& batch) {
  at::AutoGradMode with_graph(true);
  const LossTerms loss = plain_loss(tiny, batch);
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : tiny.denoiser->parameters())
    if (parameter->trainable) leaves.push_back(parameter->value);
  return torch::autograd::grad({loss.loss.sum() * (1.0 / static_cast<double>(batch.size()))}, leaves);
}

using enum Activations;

std::vector<MemoryChoice> memory(std::initializer_list<Activations> activations) {
  std::vector<MemoryChoice> choices;
  for (Activations choice : activations) choices.push_back({choice});
  return choices;
}

class Walk : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Walk, EqualsPlainAutogradBitwise) {
  TinyTraining tiny({.compute_dtype = GetParam()});
  const StepBatch batch = tiny.batch(6);
  const std::vector<at::Tensor> expected = plain_autograd(tiny, batch);
  for (const auto& choices :
       {memory({kKeep, kKeep, kKeep, kKeep}), memory({kRecompute, kRecompute, kRecompute, kRecompute}),
        memory({kOffload, kOffload, kOffload, kOffload}), memory({kKeep, kRecompute, kKeep, kRecompute}),
        memory({kRecompute, kKeep, kKeep, kKeep}), memory({kKeep, kOffload, kKeep, kOffload}),
        memory({kKeep, kKeep, kOffload, kRecompute})}) {
    TinyTraining run({.compute_dtype = GetParam(), .memory = choices});
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
  TinyTraining keep({}), recompute({.memory = memory({kRecompute, kRecompute, kRecompute, kRecompute})});
  for (int64_t step = 0; step < 5; ++step) {
    const StepBatch batch = keep.batch(4, step);
    EXPECT_EQ(keep.step->run(batch, 1e-3).loss, recompute.step->run(batch, 1e-3).loss);
  }
  expect_equal(state_of(keep), state_of(recompute));
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

// Each term is a mean over the global batch, as the loss is.
TEST(Step, TermsAreMeansOverMicroBatchesAndRanks) {
  TinyTraining tiny({});
  const StepBatch batch = tiny.batch(7);
  const LossTerms expected = plain_loss(tiny, batch);
  for (const int64_t world_size : {1, 2, 3})
    for (const int64_t micro_batch : {0, 1, 3})
      test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
        const TinyTraining run({.micro_batch = micro_batch, .group = group});
        const StepResult result = run.step->run(test::rows_of(batch, *group), 0);
        ASSERT_EQ(result.terms.size(), 2u);
        for (size_t i = 0; i < 2; ++i) {
          const double mean = expected.terms[i].mean().item<double>();
          EXPECT_NEAR(result.terms[i], mean, 1e-5 * mean) << world_size << " " << micro_batch;
        }
        EXPECT_NEAR(result.terms[0] + result.terms[1], result.loss, 1e-6 * result.loss);
      });
}

std::vector<at::Tensor> weight_grads_of(const TinyTraining& tiny) {
  std::vector<at::Tensor> grads;
  for (const auto& segment : tiny.state->segments)
    for (const at::Tensor& grad : segment.grad_views) grads.push_back(grad.flatten());
  return grads;
}

// d(mean loss) / d(weights) of contrastive flow matching (Stoica et al. 2025) over the whole batch.
at::Tensor plain_contrastive(const TinyTraining& tiny, const StepBatch& batch, double weight) {
  at::AutoGradMode with_graph(true);
  const at::Tensor sigma = batch.timesteps.view({-1, 1, 1, 1}), target = batch.noise - batch.x_0;
  const at::Tensor prediction = tiny.denoiser->forward({.x_t = (1 - sigma) * batch.x_0 + sigma * batch.noise,
                                                        .timesteps = 1000 * batch.timesteps,
                                                        .conditioning = batch.conditioning});
  const auto distance = [&](const at::Tensor& from) { return (prediction - from).square().mean(); };
  std::vector<at::Tensor> leaves, grads;
  for (const auto& segment : tiny.state->segments)
    for (const auto& parameter : segment.parameters) leaves.push_back(parameter->value);
  for (const at::Tensor& grad :
       torch::autograd::grad({distance(target) - weight * distance(target.roll(1, 0))}, leaves))
    grads.push_back(grad.flatten());
  return at::cat(grads);
}

// Each sample is compared with the one before it in the global batch, whatever that is cut into.
TEST(Step, ContrastiveLossesAreThoseOfTheGlobalBatch) {
  const TinyOptions options{.accumulate_f32 = true, .objective = "flow", .contrastive_weight = 0.3};
  const TinyTraining tiny(options);
  const StepBatch batch = tiny.batch(7);
  const at::Tensor expected = plain_contrastive(tiny, batch, 0.3);
  const std::vector<double> losses = TinyTraining(options).step->run(batch, 0).losses;
  for (const int64_t world_size : {1, 2, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t micro_batch = 0; micro_batch <= 7; ++micro_batch) {
        TinyOptions cut = options;
        cut.micro_batch = micro_batch;
        cut.group = group;
        const TinyTraining run(cut);
        const StepResult result = run.step->run(test::rows_of(batch, *group), 0);
        EXPECT_LE(test::worst_relative(result.losses, losses), 1e-5);
        EXPECT_NEAR(result.terms.at(0) - 0.3 * result.terms.at(1), result.loss, 1e-5);
        const at::Tensor grads = at::cat(weight_grads_of(run));
        EXPECT_LE((grads - expected).norm().item<double>(), 1e-5 * expected.norm().item<double>())
            << world_size << " ranks, micro-batches of " << micro_batch;
      }
    });
}

TEST(Step, NonFiniteLossMovesNothing) {
  TinyTraining tiny({});
  tiny.step->run(tiny.batch(4, 0), 1e-3);
  const std::vector<at::Tensor> before = state_of(tiny);
  StepBatch batch = tiny.batch(4, 1);
  batch.x_0.select(0, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  const StepResult result = tiny.step->run(batch, 1e-3);
  EXPECT_FALSE(result.applied);
  EXPECT_TRUE(std::isfinite(result.losses[1]));
  EXPECT_FALSE(std::isfinite(result.losses[2]));
  EXPECT_EQ(tiny.state->updates, 1);
  expect_equal(state_of(tiny), before);
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

// Bytes on the device after each segment's forward, at the end of the step and at its highest, of a dry run.
class LiveBytesLog : public AllocationObserver, public StepObserver {
 public:
  void allocated(uint64_t, size_t bytes) override {
    peak = std::max(peak, live += static_cast<int64_t>(bytes));
  }
  void freed(uint64_t, size_t bytes) override { live -= static_cast<int64_t>(bytes); }
  void begin(StepPhase, int64_t) override {}
  void end(StepPhase phase, int64_t) override {
    if (phase == StepPhase::kForward) after_forward.push_back(live);
  }
  int64_t live = 0, peak = 0;
  std::vector<int64_t> after_forward;
};

constexpr int64_t kDryBatch = 64;

LiveBytesLog dry_run(const std::vector<MemoryChoice>& choices, DryRunDevice device) {
  const DryRunScope scope(device);
  const auto depth =
      static_cast<int64_t>(choices.size()) - 2;  // blocks between the first and the last segment
  TinyTraining tiny({.device = at::kMeta, .memory = choices, .depth = depth});
  tiny.step->run(tiny.batch(kDryBatch), 1e-3);  // makes what stays
  LiveBytesLog log;
  tiny.step->observe(&log);
  const StepBatch batch = tiny.batch(kDryBatch);
  const MetaAllocationScope allocations(log);
  tiny.step->run(batch, 1e-3);
  return log;
}

// At the peak, in the last block's backward, its own input and the one before are on the device; recomputing
// keeps those of all blocks there. With two blocks these are the same.
TEST(Step, AnOffloadedInputLeavesTheDevice) {
  constexpr int64_t kHiddenBytes = kDryBatch * 16 * 48 * 4;  // (64, 16, 48) f32
  for (size_t blocks : {2, 3, 6}) {
    const auto keep_around = [&](Activations choice) {
      std::vector<MemoryChoice> choices(blocks + 2, {choice});
      choices.front() = choices.back() = {kKeep};
      return choices;
    };
    const LiveBytesLog recompute = dry_run(keep_around(kRecompute), DryRunDevice::kCuda),
                       offload = dry_run(keep_around(kOffload), DryRunDevice::kCuda),
                       on_cpu = dry_run(keep_around(kOffload), DryRunDevice::kCpu);
    ASSERT_EQ(offload.after_forward.size(), blocks + 2);
    for (size_t i = 0; i < offload.after_forward.size(); ++i)
      EXPECT_EQ(recompute.after_forward[i] - offload.after_forward[i],
                static_cast<int64_t>(std::min(i, blocks)) * kHiddenBytes)
          << i;
    EXPECT_EQ(recompute.peak - offload.peak, static_cast<int64_t>(blocks - 2) * kHiddenBytes) << blocks;
    EXPECT_EQ(offload.live, 0);
    EXPECT_EQ(on_cpu.peak, dry_run(keep_around(kRecompute), DryRunDevice::kCpu).peak);
  }
}

TEST(ActivationOffload, GivesTheSameBitsBack) {
  ActivationOffload offload(at::kCPU, 3);
  const std::vector<at::Tensor> stored = {at::randn({4, 6}), at::randn({4, 6}), at::randn({2, 6})};
  for (size_t i : {0, 1}) {
    at::Tensor passing = stored[i].clone();
    offload.store(i, passing);
    offload.release(i);
    passing.zero_();  // its memory serves others
  }
  for (size_t i : {1, 0}) {
    offload.fetch(i);
    EXPECT_TRUE(at::equal(offload.take(i), stored[i]));
  }
  offload.store(0, stored[2]);  // a smaller micro-batch in the same buffer
  offload.release(0);
  offload.fetch(0);
  EXPECT_TRUE(at::equal(offload.take(0), stored[2]));
  EXPECT_EQ(offload.host_bytes(), 2 * 4 * 6 * 4);
}

TEST(Step, NeedsAMemoryChoicePerSegment) {
  EXPECT_THROW(TinyTraining({.memory = std::vector<MemoryChoice>(2)}), Error);
}

// The update is queued before the host reads the norm, or behind it: the same bits, a skipped step and
// clipping among them.
TEST(Update, NeedNotWaitForTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    std::vector<std::vector<at::Tensor>> states;
    std::vector<std::vector<double>> numbers;
    for (const bool unread : {true, false}) {
      TinyTraining tiny({.compute_dtype = dtype, .max_grad_norm = 0.01, .updates_unread = unread});
      std::vector<double> told;
      for (uint64_t step = 0; step < 4; ++step) {
        StepBatch batch = tiny.batch(5, step);
        if (step == 1) batch.x_0.fill_(std::numeric_limits<float>::quiet_NaN());
        const StepResult result = tiny.step->run(batch, 1e-3, {.stop = false, .clock_seconds = 3.0});
        EXPECT_EQ(result.applied, step != 1);
        EXPECT_EQ(result.signals.clock_seconds, 3.0);
        if (result.applied) told.insert(told.end(), {result.loss, result.grad_norm, result.loss_scale});
      }
      EXPECT_EQ(tiny.state->updates, 3);
      numbers.push_back(told);
      states.push_back(state_of(tiny));
    }
    EXPECT_EQ(numbers[0], numbers[1]);
    expect_equal(states[0], states[1]);
  }
}

}  // namespace
}  // namespace kiln
