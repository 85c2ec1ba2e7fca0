// Training steps on a GPU: against the CPU, and against each other where the memory choices differ.

#include "cuda/gpu_test.h"
#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::kGpu, test::Outcome, test::TinyOptions, test::TinyTraining, test::worst_relative;
using enum Activations;

constexpr int64_t kBatch = 6, kSteps = 4;

TinyOptions on_gpu(TinyOptions options = {}) {
  options.device = kGpu;
  return options;
}

void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_EQ(a.state.size(), b.state.size());
  for (size_t i = 0; i < a.state.size(); ++i) EXPECT_TRUE(at::equal(a.state[i].cpu(), b.state[i].cpu())) << i;
}

using CudaStep = test::GpuTest;

TEST_F(CudaStep, TrainsAsTheCpuDoes) {
  for (const std::string objective : {"iddpm", "flow"})
    for (const auto& [dtype, allowed] :
         {std::pair{at::kFloat, 1e-4}, {at::kBFloat16, 3e-2}, {at::kHalf, 1e-2}}) {
      TinyOptions options{.compute_dtype = dtype, .max_grad_norm = 1, .objective = objective};
      const Outcome cpu = test::train(options, kBatch, kSteps),
                    gpu = test::train(on_gpu(options), kBatch, kSteps);
      EXPECT_LE(worst_relative(gpu.losses, cpu.losses), allowed) << objective << " " << c10::toString(dtype);
    }
}

TEST_F(CudaStep, MeasuresTheGradientAsTheCpuDoes) {
  TinyTraining cpu({}), gpu(on_gpu());
  const StepBatch batch = cpu.batch(kBatch);
  const RankSignals signals{.stop = false, .clock_seconds = 2.5};
  const StepResult expected = cpu.step->run(batch, 1e-3, signals), got = gpu.step->run(batch, 1e-3, signals);
  EXPECT_NEAR(got.grad_norm / expected.grad_norm, 1, 1e-4);
  EXPECT_LE(worst_relative(got.losses, expected.losses), 1e-4);
  EXPECT_EQ(got.signals.clock_seconds, 2.5);
}

TEST_F(CudaStep, AsAGraphIsTheSame) {
  for (const int64_t micro_batch : {0, 2}) {
    TinyOptions options =
        on_gpu({.compute_dtype = at::kBFloat16, .micro_batch = micro_batch, .max_grad_norm = 1});
    const Outcome plain = test::train(options, kBatch, kSteps);
    options.graphs = GraphOptions{.make_graph = [] { return make_device_graph(kGpu); },
                                  .warn = [](const std::string& line) { ADD_FAILURE() << line; }};
    expect_same(test::train(options, kBatch, kSteps), plain);
  }
}

// A host's read ends a recording. The stream, the allocator and torch's generator are then as before, and the
// next recording succeeds.
TEST_F(CudaStep, ARecordingThatFailsLeavesNothing) {
  const at::Tensor values = at::ones({100}, at::TensorOptions(kGpu));
  {
    const auto failing = make_device_graph(kGpu);
    EXPECT_ANY_THROW(failing->capture([&] { (values + 1).sum().item<double>(); }, nullptr));
    EXPECT_TRUE(at::randn({4}, at::TensorOptions(kGpu)).isfinite().all().item<bool>());
  }
  at::Tensor sum;
  const auto graph = make_device_graph(kGpu);
  graph->capture([&] { sum = (values + 1).sum(); }, nullptr);
  values.fill_(4);
  graph->replay();
  EXPECT_EQ(sum.item<double>(), 500);
  EXPECT_EQ(at::full({1 << 22}, 2, at::TensorOptions(kGpu)).sum().item<double>(), 1 << 23);
}

TEST_F(CudaStep, IsTheSameEveryTime) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const TinyOptions options = on_gpu({.compute_dtype = dtype});
    expect_same(test::train(options, kBatch, kSteps), test::train(options, kBatch, kSteps));
  }
}

// Each segment's forward waits for its own update, so none reads what is half written.
TEST_F(CudaStep, AnUpdateBesideTheNextForwardIsTheSame) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t hidden_size :
         {48, 384}) {  // an update that is shorter than the forward, and a longer one
      TinyOptions options =
          on_gpu({.compute_dtype = dtype, .max_grad_norm = 1, .depth = 4, .hidden_size = hidden_size});
      const Outcome among = test::train(options, kBatch, kSteps);
      options.update_beside = kGpu;
      expect_same(test::train(options, kBatch, kSteps), among);
    }
}

TEST_F(CudaStep, MemoryChoicesDoNotChangeABit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Outcome expected = test::train(on_gpu({.compute_dtype = dtype}), kBatch, kSteps);
    const auto train_with = [&](std::vector<MemoryChoice> choices) {
      return test::train(on_gpu({.compute_dtype = dtype, .memory = std::move(choices)}), kBatch, kSteps);
    };
    expect_same(train_with({{kRecompute}, {kRecompute}, {kRecompute}, {kRecompute}}), expected);
    expect_same(train_with({{kOffload}, {kOffload}, {kOffload}, {kOffload}}), expected);
    expect_same(train_with({{kKeep}, {kOffload}, {kRecompute}, {kKeep}}), expected);
  }
}

// The host's AdamW rounds as the GPU's does, element by element.
TEST_F(CudaStep, AnOptimizerOnTheHostTrainsTheSame) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const TinyOptions options = on_gpu({.compute_dtype = dtype, .max_grad_norm = 0.5});
    const Outcome expected = test::train(options, kBatch, kSteps);
    for (const Placement placement : {Placement::kHost, Placement::kNvme}) {
      const Outcome offloaded = test::train(test::placed(options, placement), kBatch, kSteps);
      EXPECT_LE(worst_relative(offloaded.losses, expected.losses), dtype == at::kFloat ? 1e-6 : 1e-3);
    }
  }
}

// The update that is queued unread and the one that the host has decided.
TEST_F(CudaStep, TheUpdateNeedNotWaitForTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    TinyOptions options = on_gpu({.compute_dtype = dtype, .max_grad_norm = 0.01});
    const Outcome unread = test::train(options, kBatch, kSteps);
    options.updates_unread = false;
    expect_same(test::train(options, kBatch, kSteps), unread);
  }
}

// NCCL with one rank: every collective of ZeRO runs, and nothing changes.
TEST_F(CudaStep, ZeroStagesDoNotChangeABit) {
  const TinyOptions plain = on_gpu({.compute_dtype = at::kBFloat16, .micro_batch = 2, .max_grad_norm = 0.5});
  const Outcome expected = test::train(plain, kBatch, kSteps);
  test::alone_connected(kGpu, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      TinyOptions options = plain;
      options.group = group;
      options.zero = {.stage = stage};
      const Outcome divided = test::train(options, kBatch, kSteps);
      // Stages 2 and 3 add micro-steps in another order.
      if (stage < 2)
        expect_same(divided, expected);
      else
        EXPECT_LE(worst_relative(divided.losses, expected.losses), 1e-2) << stage;
    }
    EXPECT_GT(group->volume().reduce_scattered, 0) << "NCCL was not asked";
  });
}

TEST_F(CudaStep, WeightsThatWaitOnTheHostDoNotChangeABit) {
  TinyOptions options = on_gpu({.compute_dtype = at::kBFloat16, .zero = {.stage = 3}});
  const Outcome expected = test::train(options, kBatch, kSteps);
  for (const Placement weights : {Placement::kHost, Placement::kNvme})
    expect_same(test::train(test::placed(options, Placement::kDevice, weights), kBatch, kSteps), expected);
}

TEST_F(CudaStep, ResumesToTheSameBits) {
  const test::TempFolder folder;
  const TinyOptions options = on_gpu({.compute_dtype = at::kBFloat16, .ema_decays = {0.9, 0.5}});
  const Outcome expected = test::train(options, kBatch, 2 * kSteps);
  std::string saved;
  {
    const TinyTraining first(options);
    test::take_steps(first, kBatch, 0, kSteps);
    saved = save_checkpoint(folder.path().string(), *first.state, {.step = kSteps});
  }
  const TinyTraining second(options);
  load_checkpoint(saved, *second.state);
  const Outcome resumed = test::take_steps(second, kBatch, kSteps, 2 * kSteps);
  EXPECT_EQ(resumed.losses, std::vector<double>(expected.losses.begin() + kSteps, expected.losses.end()));
  for (size_t i = 0; i < expected.state.size(); ++i)
    EXPECT_TRUE(at::equal(resumed.state[i], expected.state[i]));
}

}  // namespace
}  // namespace kiln
