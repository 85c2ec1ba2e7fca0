// The planner's prediction of time against the clock: real steps of configurations that calibration did not
// see, drawn at random from every family, on this machine's CPU.
//
//   bench_plan_time calibrate                      keeps a profile (KILN_PROFILES says where)
//   bench_plan_time run ROWS [--seed N] [--cases FROM:TO] [--measure-seconds S] [--ops]
//   bench_plan_time table ROWS > benchmarks/results/plan-time_MACHINE_DATE.md
//
// Every case is predicted twice before it is measured: from the calibration's profile alone, and after
// `kiln plan --measure-seconds S` (10) has timed what that profile lacks. Cases do not learn from each other.
// `run` appends a line of JSON for each case to ROWS, so that the table may come from several moments in
// which the machine was free. --ops prints where the errors come from, on standard error.
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
#include "plan_time_cases.h"

namespace kiln {
namespace {

constexpr StepRepeats kRepeats{.plain = 4, .least_seconds = 3};  // short steps oftener
constexpr size_t kCases = 20;

// Where the error comes from: seconds of each kind of operation, as the plan prices it and as the step took
// it.
void print_ops(const std::vector<Span>& traced, const StepTiming& timing, const MachineProfile& machine) {
  std::map<std::string, std::pair<double, double>> by_name;
  double in_ops = 0, between = 0;
  for (const Span& span : traced)
    for (const OpRecord& op : span.ops) {
      const double times = static_cast<double>(span.times),
                   overhead = machine.op_overhead_s * machine.speed.product;
      by_name[rate_key(op.name, op.dtype)].first += times * (price(op, machine) - overhead);
      between += times * overhead;
    }
  for (const OpRecord& op : ops_of(timing.spans)) {
    by_name[rate_key(op.name, op.dtype)].second += op.seconds;
    in_ops += op.seconds;
  }
  std::vector<std::pair<std::string, std::pair<double, double>>> rows(by_name.begin(), by_name.end());
  std::ranges::sort(rows, std::greater{},
                    [](const auto& row) { return std::abs(row.second.first - row.second.second); });
  fmt::print(stderr, "  operations {:.1f} ms; between them {:.1f} ms measured, {:.1f} ms predicted\n",
             in_ops * 1e3, (timing.least_seconds - in_ops) * 1e3, between * 1e3);
  for (size_t i = 0; i < std::min<size_t>(6, rows.size()); ++i)
    fmt::print(stderr, "  {:44} predicted {:9.2f} ms, measured {:9.2f} ms\n", rows[i].first,
               rows[i].second.first * 1e3, rows[i].second.second * 1e3);
}

Json predict(const std::vector<Span>& spans, const MachineProfile& machine) {
  const double share = measured_share(spans, machine);
  return {{"seconds", price_step(spans, machine).seconds},
          {"error", time_error(spans, machine)},
          {"measured share", share}};
}

struct Arguments {
  std::string what, rows;
  uint32_t seed = 0;
  size_t first = 1, last = kCases;  // counted from 1
  double measure_s = 10;
  bool ops = false;
};

Json run_case(const Arguments& arguments, size_t number) {
  const Json drawn = draw_case(arguments.seed, number);
  const TrainOptions options = drawn_options(drawn);
  const DataShape data = timed_shape(options);
  const std::vector<Span> spans = trace_step(options, data, DryRunDevice::kCpu).spans;
  MachineProfile machine = find_profile("cpu");
  if (!machine.measured) fail("plan_time", "no profile of this machine: bench_plan_time calibrate makes one");
  machine.speed = speed_of(machine.clock, read_clock(at::kCPU, kClockSeconds));  // of now, not of the start
  const Json calibrated = predict(spans, machine);
  const MeasuredStep measurement = measure_step(machine, options, data, at::kCPU, arguments.measure_s);
  const Json measured = predict(spans, machine);
  const StepTiming timing = time_steps(
      options, data, at::kCPU,
      {.plain = kRepeats.plain, .watched = arguments.ops ? 3 : 0, .least_seconds = kRepeats.least_seconds});
  fmt::print(stderr, "{:2} {}\n   calibrated {:.3f} s, with {}: {:.3f} s, really {:.3f} s\n", number,
             drawn.dump(), calibrated["seconds"].get<double>(), measurement.text,
             measured["seconds"].get<double>(), timing.seconds);
  if (arguments.ops) print_ops(spans, timing, machine);
  return {{"number", number},
          {"seed", arguments.seed},
          {"options", drawn},
          {"machine", fmt::format("{}, {} threads", machine.machine, at::get_num_threads())},
          {"measure seconds", arguments.measure_s},
          {"speed", {machine.speed.product, machine.speed.copy, machine.speed.spread}},
          {"predictions", {calibrated, measured}},
          {"seconds", timing.seconds},
          {"least seconds", timing.least_seconds}};
}

bool is_inside(double predicted, double error, double seconds) {
  return seconds <= predicted * (1 + error) && seconds >= predicted / (1 + error);
}

void print_summary(const std::vector<Json>& rows, size_t which, const std::string& name) {
  std::vector<double> errors, half_widths;
  size_t inside = 0;
  for (const Json& row : rows) {
    const Json& prediction = row.at("predictions").at(which);
    const double predicted = prediction.at("seconds"), error = prediction.at("error"),
                 seconds = row.at("seconds");
    errors.push_back(std::abs(predicted / seconds - 1));
    half_widths.push_back(error);
    inside += is_inside(predicted, error, seconds) ? 1 : 0;
  }
  std::ranges::sort(errors);
  std::ranges::sort(half_widths);
  fmt::print("| {} | {:.1f} % | {:.1f} % | {} of {} | {:.0f} % |\n", name, 100 * errors[errors.size() / 2],
             100 * errors.back(), inside, errors.size(), 100 * half_widths[half_widths.size() / 2]);
}

std::string options_text(const Json& drawn) {
  std::string text;
  for (const auto& [name, value] : drawn.items()) {
    std::string shown = value.is_string() ? value.get<std::string>() : value.dump();
    std::erase(shown, '"');
    text += fmt::format("{}--{} {}", text.empty() ? "" : " ", name, shown);
  }
  return text;
}

void print_table(const std::string& path) {
  std::vector<Json> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) rows.push_back(Json::parse(line));
  if (rows.empty()) fail("plan_time", "expected rows of bench_plan_time run in {}", path);
  fmt::print(
      "{}, {:%Y-%m-%d}. Seed {}; synthetic latents; median of {} steps or more ({:g} s) after one of "
      "warm-up. "
      "In front of every case the clock is read for {:g} s; measuring on demand takes at most {:g} s.\n\n"
      "| predicted | median error | worst | inside the interval | interval, median ± "
      "|\n|---|---|---|---|---|\n",
      rows[0].at("machine").get<std::string>(), fmt::gmtime(std::chrono::system_clock::now()),
      rows[0].at("seed").get<int>(), kRepeats.plain, kRepeats.least_seconds, kClockSeconds,
      rows[0].at("measure seconds").get<double>());
  print_summary(rows, 0, "by the calibration");
  print_summary(rows, 1, "with operations measured on demand");
  fmt::print(
      "\n| | options | calibrated s | ± | error | on demand s | ± | error | measured s | least s | "
      "arithmetic, memory "
      "x | spread |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Json& row : rows) {
    const double seconds = row.at("seconds");
    fmt::print("| {} | `{}` |", row.at("number").get<int>(), options_text(row.at("options")));
    for (const Json& prediction : row.at("predictions")) {
      const double predicted = prediction.at("seconds"), error = prediction.at("error");
      fmt::print(" {:.3f} | {:.0f} % | {:+.1f} %{} |", predicted, 100 * error,
                 100 * (predicted / seconds - 1), is_inside(predicted, error, seconds) ? "" : " **outside**");
    }
    const auto speed = row.at("speed").get<std::array<double, 3>>();
    fmt::print(" {:.3f} | {:.3f} | {:.2f}, {:.2f} | {:.0f} % |\n", seconds,
               row.at("least seconds").get<double>(), speed[0], speed[1], 100 * speed[2]);
  }
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  if (argc > 1) arguments.what = argv[1];
  int i = 2;
  if ((arguments.what == "run" || arguments.what == "table") && argc > 2) arguments.rows = argv[i++];
  for (; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--ops") {
      arguments.ops = true;
    } else if (argument == "--seed" && has_value) {
      arguments.seed = static_cast<uint32_t>(std::stoul(argv[++i]));
    } else if (argument == "--measure-seconds" && has_value) {
      arguments.measure_s = std::stod(argv[++i]);
    } else if (argument == "--cases" && has_value &&
               std::sscanf(argv[i + 1], "%zu:%zu", &arguments.first, &arguments.last) == 2) {
      ++i;
    } else {
      fail("plan_time", "unexpected '{}': the beginning of benchmarks/plan_time.cpp has the usage", argument);
    }
  }
  return arguments;
}

void run(const Arguments& arguments) {
  apply({.device = at::kCPU});
  if (arguments.what == "calibrate") {
    fmt::print("{}\n", store_profile(calibrate(at::kCPU)));
  } else if (arguments.what == "table") {
    print_table(arguments.rows);
  } else if (arguments.what == "run" && !arguments.rows.empty()) {
    for (size_t number = arguments.first; number <= arguments.last; ++number)
      std::ofstream(arguments.rows, std::ios::app) << run_case(arguments, number).dump() << "\n";
  } else {
    fail("plan_time", "expected calibrate, run ROWS or table ROWS");
  }
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
