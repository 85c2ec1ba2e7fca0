#include "plan/price/step_timing.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "core/measuring.h"
#include "ops/op_recorder.h"
#include "plan/price/machine_clock.h"
#include "plan/trace/trace.h"
#include "step/span_recorder.h"

namespace kiln {

namespace {

// Draws a batch whose captions have the mean length.
StepBatch random_batch(const TrainOptions& options, DataShape data, const Objective& objective) {
  if (!data.text.is_padded) data.text.max_rows = std::llround(data.text.mean_rows);
  const auto draw = [&](const HostArray& array, at::ScalarType dtype) {
    const at::IntArrayRef sizes = array.sizes;
    switch (array.array) {
      case BatchArray::kClassLabels:
        return at::randint(data.num_classes, sizes, dtype);
      case BatchArray::kTimeUniform:
        return at::rand(sizes, dtype);
      case BatchArray::kTextOffsets:
        return at::arange(sizes.front(), dtype).mul_(data.text.max_rows);
      case BatchArray::kImageHw:
      case BatchArray::kAspectRatio:
        return at::ones(sizes, dtype);
      default:
        return dtype == at::kBool ? at::zeros(sizes, dtype) : at::randn(sizes, dtype);
    }
  };
  BatchTensors made = dry_batch(batch_options_of(options), data, options.global_batch, draw);
  set_timesteps(made.batch, objective.timesteps(made.time_uniform));
  return made.batch;
}

// Takes over the shorter seconds of each operation, unless `again` begins with a skipped step.
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

}  // namespace

TimedTraining::TimedTraining(const TrainOptions& options, const DataShape& data, at::Device device)
    : device_(device), lr_(options.lr.peak) {
  training_ = build_training(options, data, device);
  batch_ = random_batch(options, data, *training_.objective);
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
                      const StepRepeats& repeats) {
  const auto begin = std::chrono::steady_clock::now();
  TimedTraining training(options, data, device);
  StepTiming timing;
  double last = 0;  // seconds of the step before
  // True if `steps` more like the last one still fit.
  const auto fit = [&](int steps, double grace = 1) {
    return repeats.most_seconds <= 0 || elapsed_since(begin) + steps * last <= grace * repeats.most_seconds;
  };
  const int num_kinds = 1 + std::min(1, repeats.watched);  // at least one step of each
  // The first step says little about how long later ones take, so a second one runs if it alone fits.
  for (int i = 0; i < repeats.warm_up && (i == 0 || fit(i == 1 ? 1 : 1 + num_kinds)); ++i)
    last = training.step();
  // Starting again with a smaller model would take longer than ending a little late.
  constexpr double kGrace = 1.2;
  timing.is_done = fit(num_kinds, kGrace);
  if (!timing.is_done) return timing;

  std::vector<double> seconds;
  double total = 0;
  for (int i = 0; i < repeats.plain || total < repeats.least_seconds; ++i) {
    if (i > 0 && !fit(num_kinds)) break;
    seconds.push_back(last = training.step());
    total += last;
  }
  timing.seconds = median(seconds);
  timing.least_seconds = std::ranges::min(seconds);
  if (repeats.watched == 0) return timing;

  OpRecorder ops(/*timed=*/true, device);
  SpanRecorder recorder(&ops);
  training.observe(&recorder);
  for (int i = 0; i < repeats.watched && (i == 0 || fit(1)); ++i) {
    ops.take();
    recorder.finish();
    last = training.step();
    keep_least(timing.spans, recorder.finish().spans);
  }
  training.observe(nullptr);
  return timing;
}

}  // namespace kiln
