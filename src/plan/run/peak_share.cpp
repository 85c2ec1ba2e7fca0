#include "plan/run/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/price/price.h"
#include "plan/price/this_machine.h"

namespace kiln {

namespace {

// The traced share of the counted arithmetic may be this much less: some of a CPU's operations, which are
// priced by their bytes, have none.
constexpr double kCountedShare = 0.95;

std::string text_of(const OpRecord& op) {
  return fmt::format("{} of {} x {} x {} in {}", op.name, op.m, op.n, op.k, dtype_text(op.dtype));
}

// The arithmetic of one segment's phases in a step.
struct TracedFlops {
  double forward = 0, backward = 0;   // FLOPs
  const OpRecord* largest = nullptr;  // of forward
};

std::vector<TracedFlops> work_of(const StepTrace& trace) {
  std::vector<TracedFlops> work(trace.segments.size());
  for (const Span& span : trace.spans) {
    if (span.segment < 0) continue;
    TracedFlops& segment = work.at(static_cast<size_t>(span.segment));
    for (const OpRecord& op : span.ops) {
      const double flops = op.flops * static_cast<double>(span.times);
      if (span.phase == StepPhase::kBackward) segment.backward += flops;
      if (span.phase != StepPhase::kForward) continue;
      segment.forward += flops;
      if (!segment.largest || op.flops > segment.largest->flops) segment.largest = &op;
    }
  }
  return work;
}

// Names the segment whose backward lacks the most, if the trace has less arithmetic than the model counts.
std::string missing_arithmetic(const StepTrace& trace, double counted) {
  const std::vector<TracedFlops> work = work_of(trace);
  double traced = 0;
  for (const TracedFlops& segment : work) traced += segment.forward + segment.backward;
  if (work.empty() || traced >= kCountedShare * counted) return "";
  const auto lacks = [](const TracedFlops& segment) { return segment.forward - segment.backward; };
  const auto worst = std::ranges::max_element(work, {}, lacks);
  return fmt::format(
      "{:.4g} of {:.4g} TFLOP are traced; backward of {} has {:.3g}, forward {:.3g}, most of it in {}",
      traced / 1e12, counted / 1e12, trace.segments[static_cast<size_t>(worst - work.begin())],
      worst->backward / 1e12, worst->forward / 1e12, worst->largest ? text_of(*worst->largest) : "nothing");
}

// Names the operation that gains the most by running above `most` FLOPs a second.
std::string fastest_operation(const StepTrace& trace, const MachineProfile& machine, double most) {
  const OpRecord* fastest = nullptr;
  double gained = 0, share = 0;
  for (const Span& span : trace.spans)
    for (const OpRecord& op : span.ops) {
      const double seconds = price(op, machine), least = op.flops / most;
      if ((least - seconds) * static_cast<double>(span.times) <= gained) continue;
      gained = (least - seconds) * static_cast<double>(span.times);
      share = least / seconds;
      fastest = &op;
    }
  if (!fastest) return "no single operation is too fast";
  return fmt::format("{} alone has {:.0f} %", text_of(*fastest), 100 * share);
}

}  // namespace

PeakShare peak_share_of(const StepTrace& trace, const MachineProfile& machine, int64_t images,
                        double step_s) {
  const ComputeOptions& compute = trace.options.compute;
  const double counted = trace.flops_per_image * static_cast<double>(images);
  PeakShare share;
  const auto peak = machine.peak_flops.find(compute.product_dtype());
  if (peak == machine.peak_flops.end()) return share;
  const double by_sheet = data_sheet_flops(machine.name, compute.product_dtype(), compute.tf32);
  share.of_profile = counted / step_s / peak->second;
  if (by_sheet > 0) share.mfu = counted / step_s / by_sheet;
  if (share.of_profile <= (machine.measured ? kMostShare : 1) && share.mfu <= 1) return share;
  const std::string missing = missing_arithmetic(trace, counted);
  return {.problem =
              fmt::format("internal: no share of the peak, which would be {:.0f} %: {}",
                          100 * std::max(share.of_profile, share.mfu),
                          missing.empty() ? fastest_operation(trace, machine, peak->second) : missing)};
}

}  // namespace kiln
