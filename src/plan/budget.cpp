#include "plan/budget.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <map>
#include <optional>

#include "core/error.h"
#include "models/registry.h"
#include "parallel/machine.h"
#include "plan/segment_costs.h"
#include "plan/this_machine.h"

namespace kiln {

namespace {

constexpr double kGiB = 1 << 30;
// Of a CPU process beyond its tensors, the loader's arrays and what is resident before the first step:
// kernels made on first use, thread stacks, buffers of logs and checkpoints; and what the allocator holds
// between tensors.
constexpr int64_t kFirstUseBytes = 160 << 20;
constexpr double kAllocatorShare = 0.10;

int64_t available_host_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key;) {
    int64_t kib = 0;
    if (key == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return 0;
}

// What this process may come to hold on `device`: what is free, and what it has.
int64_t free_bytes(at::Device device) {
  if (device.is_cuda()) return static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
  return available_host_bytes() + resident_bytes();
}

// The plan of options on this machine, counted as its memory is counted.
class MachineFit {
 public:
  MachineFit(const MachineProfile& machine, int64_t budget_bytes)
      : machine_(machine), budget_(budget_bytes) {}

  Plan plan(const TrainOptions& options) const { return make_plan({.train = options, .gpu = machine_.name}); }

  int64_t needed(const Plan& plan) const {
    if (machine_.device == DryRunDevice::kCuda) return plan.needed_bytes;
    const int64_t process = std::max(resident_bytes(), machine_.context_bytes) + kFirstUseBytes;
    const auto slack = static_cast<int64_t>(kAllocatorShare * static_cast<double>(plan.peak_bytes));
    return plan.needed_bytes - machine_.context_bytes + process + slack;
  }

  // The fewest recomputed FLOPs within the budget; nothing when no choice fits. What a plan adds to the live
  // bytes (rounding, fragmentation, other phases) is taken off the search's budget until it fits.
  std::optional<std::pair<TrainOptions, Plan>> choose(TrainOptions options) const {
    const DataShape data = planned_shape(options);
    const StepCosts costs = step_costs(options, data, machine_.device);
    const auto denoiser = build_denoiser(
        options.model, denoiser_config_of(options, data, *make_objective(objective_config_of(options))),
        {.device = at::kMeta});
    constexpr int kMostTries = 12;
    int64_t live_budget = budget_;
    for (int i = 0; i < kMostTries; ++i) {
      const std::vector<MemoryChoice> choices = fit_memory(costs, live_budget);
      if (choices.empty()) return std::nullopt;
      set_memory_choices(options, choices, *denoiser);
      Plan fitted = plan(options);
      const int64_t excess = needed(fitted) - budget_;
      if (excess <= 0) return std::pair{options, std::move(fitted)};
      live_budget = std::min(live_budget, peak_bytes(costs, choices)) - std::max<int64_t>(1, excess / 2);
    }
    return std::nullopt;
  }

  // Ends in the command of the largest micro-batch that fits.
  [[noreturn]] void refuse(const TrainOptions& options, const std::string& what) const {
    TrainOptions smaller = options;
    smaller.micro_batch = options.micro_batch > 0 ? options.micro_batch : options.global_batch;
    for (; smaller.micro_batch >= 1; smaller.micro_batch /= 2)
      if (const auto fitted = choose(smaller)) {
        TrainOptions nearest = fitted->first;
        if (nearest.micro_batch == nearest.global_batch) nearest.micro_batch = options.micro_batch;
        nearest.memory_budget = options.memory_budget;
        fail("train", "{}: this fits: {}", what, command_line(nearest));
      }
    fail("train", "{}, nor does any smaller --micro-batch: take a smaller model or more memory", what);
  }

 private:
  const MachineProfile& machine_;
  int64_t budget_;
};

std::string quoted(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,:=+@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string value_text(const nlohmann::json& value) {
  if (value.is_string()) return quoted(value.get<std::string>());
  if (!value.is_array()) return value.dump();
  std::string list;
  for (size_t i = 0; i < value.size(); ++i) list += (i ? "," : "") + value[i].dump();
  return list;
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

}  // namespace

int64_t parse_bytes(const std::string& text) {
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(rest, text.data() + text.size());
  static const std::map<std::string, double> kUnits = {
      {"", 1},         {"K", 0x1p10},   {"KiB", 0x1p10}, {"KB", 1e3},     {"M", 0x1p20},
      {"MiB", 0x1p20}, {"MB", 1e6},     {"G", 0x1p30},   {"GiB", 0x1p30}, {"GB", 1e9},
      {"T", 0x1p40},   {"TiB", 0x1p40}, {"TB", 1e12}};
  const auto found = kUnits.find(unit);
  const double bytes = found == kUnits.end() ? 0 : number * found->second;
  if (error != std::errc() || !(bytes >= 1) || bytes > 0x1p60)
    fail("train", "--memory-budget expects auto or a size such as 12G, 11.5GiB or 800M, got '{}'", text);
  return static_cast<int64_t>(bytes);
}

std::string command_line(const TrainOptions& options) {
  const nlohmann::json defaults = to_json(TrainOptions{}), values = to_json(options);
  std::string line = "kiln train";
  TrainOptions table;
  visit_options(table, [&](const std::string& name, const auto&, OnResume, const char*) {
    const nlohmann::json& value = values.at(name);
    if (value == defaults.at(name)) return;
    if (value.is_boolean())
      line += (value.get<bool>() ? " --" : " --no-") + name;
    else
      line += " --" + name + " " + value_text(value);
  });
  return line;
}

FittedRun fit_run(const TrainOptions& options) {
  validate(options);
  const bool has_budget = !options.memory_budget.empty();
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  if (!has_budget && !options.preflight) return run;
  const int64_t asked =
      has_budget && options.memory_budget != "auto" ? parse_bytes(options.memory_budget) : 0;
  const at::Device device = parse_device(options.device);
  const std::optional<MachineProfile> machine = profile_of(device);
  if (!machine) {
    if (has_budget)
      fail("train", "--memory-budget does not know this GPU ({}): kiln plan --calibrate measures it",
           machine_name(device));
    return run;
  }
  const int64_t budget = asked > 0 ? asked : free_bytes(device);
  const MachineFit fit(*machine, budget);
  if (!has_budget) {
    const Plan plan = fit.plan(options);
    if (fit.needed(plan) > budget)
      fit.refuse(
          options,
          fmt::format("it needs {:.2f} GiB of the {:.2f} GiB that are free (--no-preflight tries anyway)",
                      gib(fit.needed(plan)), gib(budget)));
    run.predicted = to_json(plan).at("predicted");
    return run;
  }
  const auto fitted = fit.choose(options);
  if (!fitted)
    fit.refuse(options, fmt::format("--memory-budget {} ({:.2f} GiB) is too little for --micro-batch {}",
                                    options.memory_budget, gib(budget), options.micro_batch));
  const auto& [chosen, plan] = *fitted;
  TrainOptions kept = options;
  kept.recompute = kept.offload_activations = "none";
  const double kept_s = fit.plan(kept).step_s;
  run.options = chosen;
  run.predicted = to_json(plan).at("predicted");
  run.summary = fmt::format(
      "memory budget {:.2f} GiB: --recompute {} --offload-activations {}: {:.2f} GiB, {:.2f} GiB of it "
      "tensors; "
      "{:.0f} % more time per step than keeping all",
      gib(budget), chosen.recompute, chosen.offload_activations, gib(fit.needed(plan)), gib(plan.peak_bytes),
      100 * (plan.step_s / kept_s - 1));
  return run;
}

}  // namespace kiln
