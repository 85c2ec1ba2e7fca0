// The planner's prediction of time against the clock: real steps of models that calibration did not see, on
// this machine's CPU. Calibrates first (a minute) unless told to use the stored profile.
//
//   bench_plan_time [--stored] [--cases FROM:TO] [--ops] [--records FILE] >
//   benchmarks/results/plan-time_MACHINE_DATE.md
//
// --stored --cases 1:5 is one piece of the table, for a machine that is free only for moments at a time; it
// goes to standard output like the whole. --ops adds where the errors come from, on standard error; --records
// FILE every operation of every case, as lines of JSON.
#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/machine.h"
#include "plan/price/calibrate.h"
#include "plan/price/price.h"
#include "plan/price/step_timing.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"

namespace kiln {
namespace {

constexpr StepRepeats kRepeats{.plain = 3, .least_seconds = 2.5};  // short steps oftener

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
  options.model.name = c.model;
  set_option(options, "compute-dtype", c.compute_dtype);
  options.data.image_size = c.image_size;
  options.global_batch = c.batch;
  options.micro_batch = c.micro_batch;
  options.memory.recompute = SegmentSet::parse(c.recompute);
  return options;
}

// Where the error comes from: seconds of each operation, as the trace prices it and as the step took it.
void print_ops(const std::vector<Span>& traced, const StepTiming& timing, const MachineProfile& machine) {
  struct Row {
    double predicted = 0, measured = 0;
    int num_traced = 0, num_measured = 0;
  };
  std::map<std::string, Row> by_name;
  double in_ops = 0;
  int64_t num_traced = 0;
  for (const Span& span : traced)
    for (const OpRecord& op : span.ops) {
      num_traced += span.times;
      Row& row = by_name[rate_key(op.name, op.dtype)];
      row.predicted += static_cast<double>(span.times) * (price(op, machine) - machine.op_overhead_s);
      row.num_traced += static_cast<int>(span.times);
    }
  const std::vector<OpRecord> timed = ops_of(timing.spans);
  for (const OpRecord& op : timed) {
    Row& row = by_name[rate_key(op.name, op.dtype)];
    row.measured += op.seconds;
    ++row.num_measured;
    in_ops += op.seconds;
  }
  std::vector<std::pair<std::string, Row>> rows(by_name.begin(), by_name.end());
  std::ranges::sort(rows, std::greater{},
                    [](const auto& row) { return std::abs(row.second.predicted - row.second.measured); });
  fmt::print(stderr, "  {} operations {:.1f} ms; between them {:.1f} ms measured, {:.1f} ms predicted\n",
             timed.size(), in_ops * 1e3, (timing.least_seconds - in_ops) * 1e3,
             static_cast<double>(num_traced) * machine.op_overhead_s * 1e3);
  for (size_t i = 0; i < std::min<size_t>(8, rows.size()); ++i) {
    const auto& [name, row] = rows[i];
    fmt::print(stderr, "  {:44} predicted {:9.2f} ms in {:4}, measured {:9.2f} ms in {:4}\n", name,
               row.predicted * 1e3, row.num_traced, row.measured * 1e3, row.num_measured);
  }
}

void append_records(const std::string& path, const Case& c, const StepTiming& timing) {
  std::ofstream file(path, std::ios::app);
  for (const Span& span : timing.spans)
    for (const OpRecord& op : span.ops)
      file << nlohmann::json{{"model", c.model},
                             {"batch", c.batch},
                             {"op", rate_key(op.name, op.dtype)},
                             {"class", name_of(op.op_class)},
                             {"phase", name_of(span.phase)},
                             {"flops", op.flops},
                             {"bytes", op.bytes},
                             {"m", op.m},
                             {"n", op.n},
                             {"k", op.k},
                             {"s", op.seconds}}
           << "\n";
}

struct Arguments {
  bool stored = false, ops = false;
  std::string records;
  size_t first = 1, last = std::size(kCases);  // counted from 1
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--stored") {
      arguments.stored = true;
    } else if (argument == "--ops") {
      arguments.ops = true;
    } else if (argument == "--records" && i + 1 < argc) {
      arguments.records = argv[++i];
    } else if (argument == "--cases" && i + 1 < argc &&
               std::sscanf(argv[i + 1], "%zu:%zu", &arguments.first, &arguments.last) == 2) {
      ++i;
    } else {
      fail("plan_time", "expected [--stored] [--cases FROM:TO] [--ops] [--records FILE], got '{}'", argument);
    }
  }
  if (arguments.first < 1 || arguments.last > std::size(kCases) || arguments.first > arguments.last)
    fail("plan_time", "--cases expects numbers of 1 to {}", std::size(kCases));
  return arguments;
}

void print_heading(const MachineProfile& machine) {
  const std::chrono::year_month_day today{
      std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now())};
  fmt::print(
      "# Predicted against measured time of a step\n\n{}-{:02}-{:02}, {}, {} threads, profile {}. Median "
      "of {} steps or more ({:g} s) after one of warm-up.\n`bench_plan_time` (calibrates, then trains; "
      "synthetic latents, "
      "AdamW, one EMA).\n\n",
      static_cast<int>(today.year()), static_cast<unsigned>(today.month()),
      static_cast<unsigned>(today.day()), machine_name(at::kCPU), at::get_num_threads(), machine.source,
      kRepeats.plain, kRepeats.least_seconds);
  fmt::print(
      "| model | image | dtype | batch | micro | recompute | predicted s | measured s | least s | error |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n");
}

// The relative error of one case.
double compare(const Case& c, const MachineProfile& machine, const Arguments& arguments) {
  const bool with_ops = arguments.ops || !arguments.records.empty();
  const TrainOptions options = options_of(c);
  const std::vector<Span> traced = trace_step(options, synthetic_shape(options), DryRunDevice::kCpu).spans;
  const double predicted = price_step(traced, machine).seconds;
  const StepTiming timing = time_steps(
      options, at::kCPU,
      {.plain = kRepeats.plain, .watched = with_ops ? 3 : 0, .least_seconds = kRepeats.least_seconds});
  const double error = predicted / timing.seconds - 1;
  fmt::print("| {} | {} | {} | {} | {} | {} | {:.3f} | {:.3f} | {:.3f} | {:+.1f} % |\n", c.model,
             c.image_size, c.compute_dtype, c.batch, c.micro_batch ? c.micro_batch : c.batch, c.recompute,
             predicted, timing.seconds, timing.least_seconds, 100 * error);
  std::fflush(stdout);
  if (arguments.ops) print_ops(traced, timing, machine);
  if (!arguments.records.empty()) append_records(arguments.records, c, timing);
  return error;
}

void run(const Arguments& arguments) {
  apply({.device = at::kCPU});
  if (!arguments.stored) store_profile(calibrate(at::kCPU));
  const MachineProfile machine = find_profile("cpu");
  if (!machine.measured) fail("plan_time", "no stored profile of this machine: leave out --stored");
  if (arguments.first == 1) print_heading(machine);
  std::vector<double> errors;
  for (size_t i = arguments.first; i <= arguments.last; ++i)
    errors.push_back(std::abs(compare(kCases[i - 1], machine, arguments)));
  if (errors.size() < std::size(kCases)) return;  // a piece
  std::ranges::sort(errors);
  fmt::print("\n{} configurations: median error {:.1f} % (goal < 10), worst {:.1f} % (goal < 25).\n",
             errors.size(), 100 * errors[errors.size() / 2], 100 * errors.back());
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    kiln::run(kiln::parse(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
