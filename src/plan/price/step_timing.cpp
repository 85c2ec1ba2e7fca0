#include "plan/price/step_timing.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "core/median.h"
#include "plan/trace/op_recorder.h"
#include "plan/trace/trace.h"

namespace kiln {

namespace {

// Captions are of the mean length.
StepBatch random_batch(DataShape data, int64_t size, const Objective& objective) {
  if (!data.text.is_padded) data.text.max_rows = std::llround(data.text.mean_rows);
  BatchTensors made =
      dry_batch(data, size, [&](BatchArray array, at::IntArrayRef sizes, at::ScalarType dtype) {
        switch (array) {
          case BatchArray::kClassLabels:
            return at::randint(data.num_classes, sizes, dtype);
          case BatchArray::kTimeUniform:
            return at::rand(sizes, dtype);
          case BatchArray::kTextOffsets:
            return at::arange(sizes.front(), dtype).mul_(data.text.max_rows);
          case BatchArray::kTextDropped:
            return at::zeros(sizes, dtype);
          case BatchArray::kImageHw:
          case BatchArray::kAspectRatio:
            return at::ones(sizes, dtype);
          default:
            return at::randn(sizes, dtype);
        }
      });
  made.batch.timesteps = objective.timesteps(made.time_uniform);
  return made.batch;
}

// Takes over the shorter seconds of each operation, unless a skipped step came before.
void keep_least(std::vector<Span>& spans, std::vector<Span> again) {
  if (spans.empty()) spans = std::move(again);
  if (!std::ranges::equal(
          spans, again, {}, [](const Span& span) { return span.ops.size(); },
          [](const Span& span) { return span.ops.size(); }))
    return;
  for (size_t i = 0; i < spans.size(); ++i)
    for (size_t op = 0; op < spans[i].ops.size(); ++op)
      spans[i].ops[op].seconds = std::min(spans[i].ops[op].seconds, again[i].ops[op].seconds);
}

double elapsed_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What of `wanted` goes into so many steps: one of each kind that is timed, then one more of each in turn.
StepRepeats repeats_within(const StepRepeats& wanted, int steps) {
  StepRepeats fitting{.plain = 1, .watched = std::min(1, wanted.watched), .warm_up = 0};
  int left = steps - fitting.plain - fitting.watched;
  const auto add = [&](int& count, int most) {
    if (left <= 0 || count >= most) return false;
    ++count, --left;
    return true;
  };
  while (add(fitting.warm_up, wanted.warm_up) | add(fitting.plain, wanted.plain) |
         add(fitting.watched, wanted.watched)) {
  }
  return fitting;
}

}  // namespace

TimedTraining::TimedTraining(const TrainOptions& options, const DataShape& data, at::Device device)
    : device_(device), lr_(options.lr.peak) {
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
  return time_steps(options, synthetic_shape(options), device, repeats);
}

StepTiming time_steps(const TrainOptions& options, const DataShape& data, at::Device device,
                      const StepRepeats& wanted) {
  const auto begin = std::chrono::steady_clock::now();
  TimedTraining training(options, data, device);
  StepTiming timing;
  StepRepeats repeats = wanted;
  if (wanted.most_seconds > 0) {
    const double first = training.step();
    const int steps = static_cast<int>(std::min(1e3, (wanted.most_seconds - elapsed_since(begin)) / first));
    timing.is_done = steps >= 1 + std::min(1, wanted.watched);
    if (!timing.is_done) return timing;
    repeats = repeats_within(wanted, steps);
  }
  for (int i = 0; i < repeats.warm_up; ++i) training.step();

  std::vector<double> seconds;
  double total = 0;
  for (int i = 0; i < repeats.plain || total < repeats.least_seconds; ++i) {
    seconds.push_back(training.step());
    total += seconds.back();
  }
  timing.seconds = median(seconds);
  timing.least_seconds = std::ranges::min(seconds);
  if (repeats.watched == 0) return timing;

  OpRecorder ops(/*timed=*/true, device);
  SpanRecorder recorder(&ops);
  training.observe(&recorder);
  for (int i = 0; i < repeats.watched; ++i) {
    ops.take();
    recorder.finish();
    training.step();
    keep_least(timing.spans, recorder.finish().spans);
  }
  training.observe(nullptr);
  return timing;
}

}  // namespace kiln
