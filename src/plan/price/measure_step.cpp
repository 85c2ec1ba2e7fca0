#include "plan/price/calibrate.h"

#include <ATen/DeviceAccelerator.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>

#include "core/error.h"
#include "core/memory_limits.h"
#include "core/tensors.h"
#include "plan/price/price.h"
#include "plan/trace/trace.h"

namespace kiln {

namespace {

// The first steps touch their memory and compile oneDNN's kernels, and later ones do not. So three pass
// unmeasured if there is time.
constexpr StepRepeats kRepeats{.plain = 3, .watched = 2, .warm_up = 3};
// The fewest that are of use: one that warms up, one by the clock, one operation by operation.
constexpr double kLeastSteps = 3;
// Seconds of each of the two readings of the clock.
constexpr double kReadingSeconds = kClockSeconds / 2;
// A table with this share of a step's time has all that matters.
constexpr double kWhole = 0.995;
// Depths to try, from the whole model down; 0 is the model's own.
constexpr int64_t kDepths[] = {0, 8, 4, 2, 1};

// Returns the options with at most two passes, which show gradients being written and being added.
TrainOptions with_depth(TrainOptions options, int64_t depth) {
  const int64_t pass = rows_of_walk(options, /*world_size=*/1);
  options.global_batch = std::min(options.global_batch, 2 * pass);
  options.micro_batch = pass < options.global_batch ? pass : 0;
  options.memory.budget = {};
  if (depth == 0) return options;
  options.model.depth = depth;
  // If some segments are chosen, the first block stands for them.
  for (SegmentSet* set : {&options.memory.recompute, &options.memory.offload_activations})
    if (!set->is_none() && !set->is_all()) *set = SegmentSet::parse("0");
  return options;
}

int64_t free_memory(at::Device device) {
  return device.is_cpu() ? host_memory().available_bytes
                         : static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
}

// Returns nothing for options that cannot be trained, such as a depth that contradicts the model's config.
std::optional<StepTrace> try_trace(const TrainOptions& options, const DataShape& data, at::Device device) {
  try {
    return trace_step(options, data, dry_run_of(device));
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

void add_step(MachineProfile& profile, const StepTiming& timing) {
  constexpr double kLeastShare = 0.5, kMostShare = 1.5;  // outside this range something else went on
  struct Seen {
    double seconds = 0, count = 0;
    OpRecord op{};
  };
  std::map<std::string, Seen> seen;
  double in_ops = 0, count = 0;
  for (const OpRecord& op : ops_of(timing.spans)) {
    ++count;
    in_ops += op.seconds;
    if (op.flops <= 0 && op.bytes <= 0) continue;
    Seen& of_shape = seen[fmt::format("{} {} {} {} {} {}", rate_key(op.name, op.dtype), op.flops, op.bytes,
                                      op.m, op.n, op.k)];
    of_shape.op = op;
    of_shape.seconds += op.seconds;
    ++of_shape.count;
  }
  if (in_ops <= 0) return;
  const double overheads = count * profile.op_overhead_s * profile.speed.product;
  const double share = std::clamp((timing.seconds - overheads) / in_ops, kLeastShare, kMostShare);
  for (const auto& [shape, of_shape] : seen) {
    const double factor = of_shape.op.flops > 0 ? profile.speed.product : profile.speed.copy;
    if (of_shape.seconds > 0)
      profile.operations.set(of_shape.op, share * of_shape.seconds / of_shape.count / factor);
  }
}

MeasuredStep measure_step(MachineProfile& profile, const TrainOptions& options, const DataShape& data,
                          at::Device device, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<MachineClock> readings;
  const auto read = [&] {  // before and after, to notice a machine that changes meanwhile
    if (has_clock(profile))
      std::ranges::copy(read_clock(device, kReadingSeconds), std::back_inserter(readings));
  };
  read();
  double least_seconds = 0;
  for (const int64_t depth : kDepths) {
    const TrainOptions shallow = with_depth(options, depth);
    const std::optional<StepTrace> trace = try_trace(shallow, data, device);
    if (!trace) continue;
    if (depth == 0 && measured_share(trace->spans, profile) >= kWhole)
      return {.is_done = true, .text = "the profile has all operations of this step"};
    const double takes = kLeastSteps * price_step(trace->spans, profile).seconds;
    if (least_seconds == 0 || takes < least_seconds) least_seconds = takes;
    StepRepeats repeats = kRepeats;
    repeats.most_seconds = seconds - elapsed() - (has_clock(profile) ? kReadingSeconds : 0);
    if (takes > repeats.most_seconds || trace->memory.peak_bytes > free_memory(device) / 2) continue;
    const StepTiming timing = time_steps(shallow, data, device, repeats);
    if (!timing.is_done) continue;
    read();
    if (!readings.empty()) profile.speed = speed_of(profile.clock, readings);
    add_step(profile, timing);
    return {.is_done = true,
            .text = fmt::format("measured steps of {} in {:.1f} s; the profile has {} operations now",
                                depth == 0 ? "the whole model" : fmt::format("{} of its blocks", depth),
                                elapsed(), profile.operations.size())};
  }
  return {.text = fmt::format("nothing was measured: even a model of one block takes about {:.0f} s, or more "
                              "than half of the free memory",
                              least_seconds)};
}

}  // namespace kiln
