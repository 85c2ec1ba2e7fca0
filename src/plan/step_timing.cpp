#include "plan/step_timing.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <chrono>

#include "core/aten.h"
#include "core/error.h"
#include "core/median.h"

namespace kiln {

namespace {

StepBatch random_batch(const DataShape& data, int64_t size, const Objective& objective) {
  const std::vector<int64_t> shape{size, data.channels, data.height, data.width};
  StepBatch batch{.x_0 = at::randn(shape),
                  .noise = at::randn(shape),
                  .timesteps = objective.timesteps(at::rand({size}, at::kDouble))};
  if (data.num_classes > 0) batch.class_labels = at::randint(data.num_classes, {size}, at::kLong);
  return batch;
}

}  // namespace

TimedTraining::TimedTraining(const TrainOptions& options, at::Device device)
    : device_(device), lr_(options.lr) {
  const DataShape data = synthetic_shape(options);
  training_ = build_training(options, data, device);
  batch_ = random_batch(data, options.global_batch, *training_.objective);
}

double TimedTraining::step() {
  constexpr int kMaxSkipped = 30;
  for (int i = 0; i < kMaxSkipped; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const bool applied = training_.step->run(batch_, lr_).applied;
    if (device_.is_cuda()) at::accelerator::synchronizeDevice(device_.index());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (applied) return seconds.count();
  }
  fail("calibrate", "expected finite gradients, got none in {} steps", kMaxSkipped);
}

StepTiming time_steps(const TrainOptions& options, at::Device device, const StepRepeats& repeats) {
  TimedTraining training(options, device);
  training.step();

  StepTiming timing;
  std::vector<double> seconds;
  double total = 0;
  for (int i = 0; i < repeats.plain || total < repeats.least_seconds; ++i) {
    seconds.push_back(training.step());
    total += seconds.back();
  }
  timing.seconds = median(seconds);
  timing.least_seconds = std::ranges::min(seconds);
  if (repeats.watched == 0) return timing;

  OpRecorder recorder(/*timed=*/true, device);
  training.observe(&recorder);
  std::vector<std::vector<OpRecord>> runs;
  for (int i = 0; i < repeats.watched; ++i) {
    recorder.take();
    training.step();
    runs.push_back(recorder.take());
    if (runs.back().size() != runs.front().size())  // a skipped step came before
      runs.pop_back();
  }
  training.observe(nullptr);
  timing.ops = runs.front();
  for (size_t op = 0; op < timing.ops.size(); ++op)
    for (const auto& run : runs) timing.ops[op].seconds = std::min(timing.ops[op].seconds, run[op].seconds);
  return timing;
}

}  // namespace kiln
