// Where the time of a training step goes on this machine's processor: every kind of operation with its
// seconds, its share of the step and how much of the machine it uses, as a table for benchmarks/results.
//
//   bench_step_operations [OPTION VALUE]...   options of kiln train without dashes: model DiT-S/2
//   global-batch 32
//
// "of the peak" is of the machine's best square product in the same dtype, "of the bandwidth" of its copying
// rate, both measured in the same run. An operation that moves and computes is held to the slower of the two.
#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/machine.h"
#include "plan/price/machine_profile.h"
#include "plan/price/step_timing.h"
#include "run/option_values.h"

namespace kiln {
namespace {

struct Row {
  int count = 0;
  double seconds = 0, flops = 0, bytes = 0;
  double peak_flops = 0;     // that the peak would have made in these seconds
  double least_seconds = 0;  // at the peak and the bandwidth
};

class OperationTable {
 public:
  OperationTable(const TrainOptions& options, const MachineProfile& machine) : machine_(machine) {
    const at::ScalarType product = options.compute.product_dtype();
    peaks_[at::kFloat] = measure_peak_flops(at::kCPU, at::kFloat);
    if (product != at::kFloat) peaks_[product] = measure_peak_flops(at::kCPU, product);
    timing_ = time_steps(options, at::kCPU, {.plain = 5, .watched = 5, .least_seconds = 5});
    for (const OpRecord& op : ops_of(timing_.spans)) {
      Row& row = rows_[op.name + " " + dtype_text(op.dtype)];
      ++row.count;
      row.seconds += op.seconds;
      row.flops += op.flops;
      row.bytes += op.bytes;
      row.peak_flops += peak_of(op.dtype) * op.seconds;
      row.least_seconds += std::max(op.flops / peak_of(op.dtype), op.bytes / machine_.memory_bytes_per_s);
    }
  }

  void print(const std::string& command) const {
    const std::chrono::year_month_day today{
        std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now())};
    double in_ops = 0, flops = 0;
    for (const auto& [name, row] : rows_) {
      in_ops += row.seconds;
      flops += row.flops;
    }
    fmt::print("## `bench_step_operations {}`\n\n{}-{:02}-{:02}, {}, {} threads. ", command,
               static_cast<int>(today.year()), static_cast<unsigned>(today.month()),
               static_cast<unsigned>(today.day()), machine_name(at::kCPU), at::get_num_threads());
    for (const auto& [dtype, peak] : peaks_)
      fmt::print("Peak in {}: {:.0f} GFLOP/s. ", dtype_text(dtype), peak / 1e9);
    const double fastest =
        std::ranges::max_element(peaks_, {}, [](const auto& entry) { return entry.second; })->second;
    fmt::print(
        "Bandwidth: {:.1f} GB/s.\nA step takes {:.1f} ms (median of 5 or more, least {:.1f} ms) for {:.1f} "
        "GFLOP: "
        "**{:.0f} % of the peak**. Between the operations pass {:.1f} ms.\n\n"
        "| operation | calls | ms | of the step | GFLOP/s | of the peak | GB/s | of the bandwidth | of the "
        "slower bound |\n"
        "|---|---|---|---|---|---|---|---|---|\n",
        machine_.memory_bytes_per_s / 1e9, timing_.seconds * 1e3, timing_.least_seconds * 1e3, flops / 1e9,
        100 * flops / timing_.seconds / fastest, (timing_.least_seconds - in_ops) * 1e3);
    std::vector<std::pair<std::string, Row>> sorted(rows_.begin(), rows_.end());
    std::ranges::sort(sorted, std::greater{}, [](const auto& entry) { return entry.second.seconds; });
    double shown = 0;
    for (const auto& [name, row] : sorted) {
      if (shown > kShown * in_ops) break;
      shown += row.seconds;
      print_row(name, row, in_ops);
    }
    fmt::print("\n");
  }

 private:
  static constexpr double kShown = 0.985;  // of the operations' time

  double peak_of(at::ScalarType dtype) const {
    const auto found = peaks_.find(dtype);
    return (found == peaks_.end() ? peaks_.begin() : found)->second;
  }
  void print_row(const std::string& name, const Row& row, double in_ops) const {
    const double gflops = row.flops / row.seconds / 1e9, gbytes = row.bytes / row.seconds / 1e9;
    const std::string products =
        row.flops > 0 ? fmt::format("{:.0f} | {:.0f} %", gflops, 100 * row.flops / row.peak_flops)
                      : std::string("| ");
    fmt::print("| {} | {} | {:.1f} | {:.1f} % | {} | {:.1f} | {:.0f} % | {:.0f} % |\n", name, row.count,
               row.seconds * 1e3, 100 * row.seconds / in_ops, products, gbytes,
               1e11 * gbytes / machine_.memory_bytes_per_s, 100 * row.least_seconds / row.seconds);
  }

  const MachineProfile machine_;
  std::map<at::ScalarType, double> peaks_;
  StepTiming timing_;
  std::map<std::string, Row> rows_;
};

void run(int argc, char** argv) {
  TrainOptions options;
  std::string command;
  if (argc % 2 == 0)
    fail("step_operations", "expected pairs of an option and a value, got '{}' alone", argv[argc - 1]);
  for (int i = 1; i + 1 < argc; i += 2) {
    const nlohmann::json number = nlohmann::json::parse(argv[i + 1], nullptr, /*allow_exceptions=*/false);
    set_option(options, argv[i], number.is_number() ? number : nlohmann::json(argv[i + 1]));
    command += fmt::format("{}{} {}", i > 1 ? " " : "", argv[i], argv[i + 1]);
  }
  apply({.device = at::kCPU});
  OperationTable(options, estimate_cpu()).print(command);
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    kiln::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
