// Steps whose walks are replayed against steps that are walked kernel by kernel. The graph here runs its
// recorded work again, on the CPU; tests/cuda/step_test.cpp has the device's own.

#include "repeated_work.h"
#include "train/tiny_model.h"

namespace kiln {
namespace {

using test::Recording;

struct Ran {
  std::vector<StepResult> results;
  std::vector<at::Tensor> weights;
};

Ran run(test::TinyOptions options, std::optional<GraphOptions> graphs, const std::vector<int64_t>& batches,
        bool has_input_noise = false) {
  options.graphs = std::move(graphs);
  test::TinyTraining training(options);
  Ran ran;
  for (size_t i = 0; i < batches.size(); ++i) {
    StepBatch batch = training.batch(batches[i], i);
    if (has_input_noise) batch.input_noise = batch.noise.flip(0).contiguous();
    ran.results.push_back(training.step->run(batch, 1e-2));
  }
  for (const auto& segment : training.state->segments)
    ran.weights.push_back(segment.unit.compute_weights.clone());
  return ran;
}

void expect_equal(const Ran& graphed, const Ran& plain) {
  for (size_t i = 0; i < plain.results.size(); ++i) {
    EXPECT_EQ(graphed.results[i].losses, plain.results[i].losses) << i;
    EXPECT_EQ(graphed.results[i].grad_norm, plain.results[i].grad_norm) << i;
  }
  for (size_t i = 0; i < plain.weights.size(); ++i)
    EXPECT_TRUE(at::equal(graphed.weights[i], plain.weights[i])) << i;
}

TEST(StepGraphs, ReplaysGiveTheSameBits) {
  for (const int64_t micro_batch : {0, 2}) {
    test::TinyOptions options;
    options.micro_batch = micro_batch;
    options.max_grad_norm = 1;
    options.memory = {{}, {Activations::kRecompute}, {}, {}};
    const std::vector<int64_t> batches = {6, 6, 6, 4, 6, 4, 4, 6};
    Recording recording;
    expect_equal(run(options, recording.options(), batches), run(options, std::nullopt, batches));
    // The whole batches of 6 and of 4; the first, middle and last micro-batch of 6, and the first and last
    // of 4.
    EXPECT_EQ(recording.captures, micro_batch == 0 ? 2 : 5);
    EXPECT_TRUE(recording.warnings.empty());
  }
}

TEST(StepGraphs, NoiseOfTheInputIsThatOfEachBatch) {
  const std::vector<int64_t> batches(4, 4);
  Recording recording;
  expect_equal(run({}, recording.options(), batches, true), run({}, std::nullopt, batches, true));
  EXPECT_EQ(recording.captures, 1);
}

TEST(StepGraphs, HalosAreThoseOfEachMicroBatch) {
  test::TinyOptions options;
  options.objective = "flow";
  options.contrastive_weight = 0.3;
  options.micro_batch = 2;
  const std::vector<int64_t> batches(4, 6);
  Recording recording;
  expect_equal(run(options, recording.options(), batches), run(options, std::nullopt, batches));
  EXPECT_EQ(recording.captures, 3);
}

// A loss scale is part of what is recorded.
TEST(StepGraphs, ALossScaleThatChangesIsRecordedAgain) {
  test::TinyOptions options;
  options.compute_dtype = at::kHalf;
  options.loss_scaler = {.initial_scale = 256, .growth_interval = 3};
  const std::vector<int64_t> batches(8, 4);
  Recording recording;
  expect_equal(run(options, recording.options(), batches), run(options, std::nullopt, batches));
  EXPECT_GE(recording.captures, 2);
}

TEST(StepGraphs, ADeviceWithoutGraphsIsToldOfOnce) {
  Recording recording;
  GraphOptions graphs = recording.options();
  graphs.make_graph = [] { return make_device_graph(at::kCPU); };
  const std::vector<int64_t> batches(4, 3);
  expect_equal(run({}, graphs, batches), run({}, std::nullopt, batches));
  EXPECT_EQ(recording.warnings, std::vector<std::string>{"this device records no graphs"});
}

}  // namespace
}  // namespace kiln
