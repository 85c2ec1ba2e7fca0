// What watching costs while nobody asks: the allocator that counts, the marks around operations, the phase
// timers. Whole steps with and without, in turns.
//
//   bench_always_on > benchmarks/results/always-on_MACHINE_DATE.md
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/allocations.h"
#include "core/aten.h"
#include "ops/op_mark.h"
#include "parallel/machine.h"
#include "plan/price/step_timing.h"
#include "run/option_values.h"
#include "watch/phase_timers.h"

namespace kiln {
namespace {

constexpr int kRounds = 9;
constexpr uint8_t kPriority = 255;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Seconds of a mark to which nobody listens.
double mark_seconds() {
  constexpr int kMarks = 1'000'000;
  const at::Tensor tensor = at::empty({1});
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kMarks; ++i) {
    ops::OpMark mark("kiln::nothing", tensor, tensor, tensor);
    mark.outputs(tensor);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kMarks;
}

void compare(const std::string& dtype, c10::Allocator* plain, c10::Allocator* tracking, double mark) {
  TrainOptions options;
  options.model.name = "DiT-S/2";
  options.global_batch = 8;
  set_option(options, "compute-dtype", dtype);
  TimedTraining training(options, synthetic_shape(options), at::kCPU);
  PhaseTimers timers(at::kCPU);
  training.step();
  std::vector<double> without, with;
  for (int round = 0; round < kRounds; ++round) {
    c10::SetAllocator(c10::kCPU, plain, kPriority);
    without.push_back(training.step());
    c10::SetAllocator(c10::kCPU, tracking, kPriority);
    training.observe(&timers);
    with.push_back(training.step());
    timers.end_step();
    training.observe(nullptr);
  }
  const StepTiming watched = time_steps(options, at::kCPU, {.plain = 1, .watched = 1});
  const auto marks = static_cast<double>(std::ranges::count_if(
      ops_of(watched.spans), [](const OpRecord& op) { return op.name.starts_with("kiln::"); }));
  fmt::print("| {} | {:.4f} | {:.4f} | {:+.2f} % | {:.4f} | {:.4f} | {:+.2f} % | {:.0f} | {:.4f} % |\n",
             dtype, median(without), median(with), 100 * (median(with) / median(without) - 1),
             std::ranges::min(without), std::ranges::min(with),
             100 * (std::ranges::min(with) / std::ranges::min(without) - 1), marks,
             100 * marks * mark / std::ranges::min(without));
}

void run() {
  apply({.device = at::kCPU});
  c10::Allocator* plain = c10::GetAllocator(c10::kCPU);
  install_tracking_cpu_allocator();
  c10::Allocator* tracking = c10::GetAllocator(c10::kCPU);
  const double mark = mark_seconds();
  fmt::print(
      "# Cost of what always watches a step\n\nDiT-S/2, batch 8, {}, {} threads. {} rounds, a step without "
      "and a "
      "step with the counting allocator and the phase timers in turns; marks: {:.0f} ns each, nobody "
      "listening.\n\n| dtype | without s | with s | cost | least without s | least with s | cost | marks | "
      "cost of "
      "marks |\n|---|---|---|---|---|---|---|---|---|\n",
      machine_name(at::kCPU), at::get_num_threads(), kRounds, 1e9 * mark);
  for (const char* dtype : {"bf16", "f32"}) compare(dtype, plain, tracking, mark);
}

}  // namespace
}  // namespace kiln

int main() { kiln::run(); }
