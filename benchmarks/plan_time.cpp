// The planner's prediction of time against the clock: real steps of models that calibration did not see, on
// this machine's CPU. Calibrates first (a minute) unless told to use the stored profile.
//
//   bench_plan_time [--stored] [--short] [--ops] > benchmarks/results/plan-time_MACHINE_DATE.md
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "core/error.h"
#include "parallel/machine.h"
#include "plan/calibrate.h"
#include "plan/price.h"
#include "plan/step_timing.h"
#include "plan/trace.h"

namespace kiln {
namespace {

struct Case {
  const char* model;
  const char* compute_dtype;
  int64_t image_size, batch, micro_batch;
  const char* recompute;
};
constexpr Case kCases[] = {{"DiT-S/2", "bf16", 256, 8, 0, "none"},  {"DiT-S/4", "bf16", 256, 32, 0, "none"},
                           {"DiT-S/8", "bf16", 256, 64, 0, "none"}, {"DiT-B/4", "bf16", 256, 8, 0, "none"},
                           {"DiT-B/8", "f32", 256, 16, 0, "none"},  {"DiT-S/2", "f32", 256, 4, 0, "none"},
                           {"DiT-S/4", "fp16", 256, 16, 0, "none"}, {"DiT-S/2", "bf16", 256, 16, 4, "none"},
                           {"DiT-S/2", "bf16", 256, 8, 0, "all"},   {"DiT-B/2", "bf16", 256, 2, 0, "none"},
                           {"DiT-S/4", "f32", 256, 12, 0, "all"},   {"DiT-L/4", "bf16", 256, 4, 0, "none"},
                           {"DiT-S/2", "bf16", 512, 2, 0, "none"},  {"DiT-S/8", "f32", 512, 16, 0, "0-5"},
                           {"DiT-B/8", "bf16", 256, 48, 0, "none"}, {"DiT-S/8", "fp16", 256, 40, 0, "none"},
                           {"DiT-XL/8", "bf16", 256, 6, 0, "none"}, {"DiT-B/4", "f32", 256, 6, 3, "all"},
                           {"DiT-S/2", "bf16", 256, 24, 0, "none"}, {"DiT-B/4", "bf16", 256, 20, 10, "0-3"}};

TrainOptions options_of(const Case& c) {
  TrainOptions options;
  options.model = c.model;
  options.compute_dtype = c.compute_dtype;
  options.image_size = c.image_size;
  options.global_batch = c.batch;
  options.micro_batch = c.micro_batch;
  options.recompute = c.recompute;
  return options;
}

// Where the error comes from: seconds of each operation, priced and measured.
void print_ops(const std::vector<OpRecord>& measured, const MachineProfile& machine) {
  std::map<std::string, std::array<double, 3>> by_name;
  double in_ops = 0;
  for (const OpRecord& op : measured) {
    auto& row = by_name[rate_key(op.name, op.dtype)];
    row[0] += price(op, machine) - machine.op_overhead_s;
    row[1] += op.seconds;
    ++row[2];
    in_ops += op.seconds;
  }
  std::vector<std::pair<std::string, std::array<double, 3>>> rows(by_name.begin(), by_name.end());
  std::ranges::sort(rows, std::greater{},
                    [](const auto& row) { return std::abs(row.second[0] - row.second[1]); });
  fmt::print(stderr, "  operations {:.1f} ms, {} of them\n", in_ops * 1e3, measured.size());
  for (size_t i = 0; i < std::min<size_t>(8, rows.size()); ++i)
    fmt::print(stderr, "  {:44} priced {:9.2f} ms, measured {:9.2f} ms, {} times\n", rows[i].first,
               rows[i].second[0] * 1e3, rows[i].second[1] * 1e3, rows[i].second[2]);
}

void run(const std::set<std::string>& flags) {
  apply({.device = at::kCPU});
  if (!flags.contains("--stored")) store_profile(calibrate("cpu"));
  const MachineProfile machine = find_profile("cpu");
  if (!machine.measured) fail("plan_time", "no stored profile of this machine: leave out --stored");
  const std::chrono::year_month_day today{
      std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now())};
  fmt::print(
      "# Predicted against measured time of a step\n\n{}-{:02}-{:02}, {}, {} threads, profile {}. Median of "
      "3 steps after one of "
      "warm-up.\n`bench_plan_time` (calibrates, then trains; synthetic latents, AdamW, one EMA).\n\n",
      static_cast<int>(today.year()), static_cast<unsigned>(today.month()),
      static_cast<unsigned>(today.day()), machine_name(at::kCPU), at::get_num_threads(), machine.source);
  fmt::print(
      "| model | image | dtype | batch | micro | recompute | predicted s | measured s | error |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  std::vector<double> errors;
  for (const Case& c : kCases) {
    if (flags.contains("--short") && errors.size() == 8) break;
    const TrainOptions options = options_of(c);
    const double predicted =
        price_step(trace_step(options, synthetic_shape(options), DryRunDevice::kCpu).ops, machine).seconds;
    const StepTiming timing = time_steps(options, at::kCPU, 3, flags.contains("--ops"));
    const double error = predicted / timing.seconds - 1;
    errors.push_back(std::abs(error));
    fmt::print("| {} | {} | {} | {} | {} | {} | {:.3f} | {:.3f} | {:+.1f} % |\n", c.model, c.image_size,
               c.compute_dtype, c.batch, c.micro_batch ? c.micro_batch : c.batch, c.recompute, predicted,
               timing.seconds, 100 * error);
    std::fflush(stdout);
    if (flags.contains("--ops")) print_ops(timing.ops, machine);
  }
  std::ranges::sort(errors);
  fmt::print("\n{} configurations: median error {:.1f} % (goal < 10), worst {:.1f} % (goal < 25).\n",
             errors.size(), 100 * errors[errors.size() / 2], 100 * errors.back());
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    kiln::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
