#include "plan/budget.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/heap.h"
#include "core/memory_limits.h"
#include "models/registry.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "plan/segment_costs.h"
#include "plan/step_timing.h"
#include "plan/this_machine.h"
#include "train/memory_choices.h"
#include "train/run_ranks.h"

namespace kiln {

namespace {

constexpr double kGiB = 1 << 30;
// Of a CPU process that gives freed memory back, beyond its tensors, the loader's arrays and what is resident
// after a first small step: buffers of logs, checkpoints and reports, kernels of other shapes, pages that
// tensors use in part. Twice the most that was measured over widths, batches, dtypes and threads:
// benchmarks/results/budget_*.
constexpr int64_t kRunBytes = 48 << 20;
constexpr double kAllocatorShare = 0.01;
// One that keeps freed memory comes to hold up to a third more than its tensors (the same measurements): it
// keeps it where there is room for as much again.
constexpr double kKeptShare = 1;
constexpr int64_t kBudgetParts = 512;  // a budget is used to this precision

// What this process may come to hold on `device`: what is free, and what it has. Local ranks share the
// host's.
int64_t free_bytes(at::Device device, const MachineProfile& machine, const Ranks& ranks,
                   const FitTerms& terms) {
  if (device.is_cuda())  // asking makes the context, which the plan counts too
    return static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first) + machine.context_bytes;
  const int64_t host = terms.host_bytes > 0 ? terms.host_bytes : host_memory().available_bytes;
  return host / ranks.local_world_size + resident_bytes();
}

// A CPU process beside the plan's tensors and arrays.
struct Process {
  int64_t bytes = 0;
  double share = 0;  // of the tensors
};

// Of one that keeps to a budget. Measured once code, threads and kernels of a step are in memory: after a
// step of a model so small that its tensors do not count.
Process frugal_process(const TrainOptions& options, const Ranks& ranks) {
  return_freed_memory();
  apply(ComputeSettings{.device = at::kCPU,
                        .threads = options.threads,
                        .cpu_share = std::max<int64_t>(1, num_own_cpus() / ranks.local_world_size)});
  TrainOptions tiny;
  tiny.model = "dit";
  tiny.hidden_size = 128;
  tiny.num_heads = 2;
  tiny.depth = 1;
  tiny.patch_size = 4;
  tiny.num_classes = 10;
  tiny.image_size = 128;
  tiny.global_batch = 8;
  tiny.compute_dtype = options.compute_dtype;
  time_steps(tiny, at::kCPU, {.plain = 1});
  return {.bytes = resident_bytes() + kRunBytes, .share = kAllocatorShare};
}

// Of one that keeps freed memory for its next use.
Process keeping_process(const MachineProfile& machine) {
  return {.bytes = std::max(resident_bytes(), machine.context_bytes), .share = kKeptShare};
}

struct Choice {
  TrainOptions options;
  Plan plan;
};

// The plan of options on this machine, counted as its memory is counted.
class MachineFit {
 public:
  MachineFit(const MachineProfile& machine, const Process& process, int64_t budget_bytes, int64_t world_size)
      : machine_(&machine), process_(process), budget_(budget_bytes), world_size_(world_size) {}

  // Of the ranks with the most rows.
  Plan plan(TrainOptions options) const {
    const int64_t rows = rows_of_rank(options);
    options.global_batch = rows * world_size_;
    options.micro_batch = std::min(options.micro_batch, rows);
    const DataShape data = planned_shape(options);
    return compose_plan({.train = options, .gpu = machine_->name, .gpus = world_size_},
                        options.tf32 ? with_tf32(*machine_) : *machine_, data,
                        trace_step(options, data, machine_->device, world_size_));
  }

  int64_t needed(const Plan& plan) const {
    if (machine_->device == DryRunDevice::kCuda) return plan.needed_bytes;
    int64_t live = 0;
    for (const PhasePlan& phase : plan.phases) live = std::max(live, phase.live_bytes);
    return plan.needed_bytes - machine_->context_bytes + process_.bytes +
           static_cast<int64_t>(process_.share * static_cast<double>(live));
  }

  // The fewest recomputed FLOPs within the budget; nothing when no choice fits. What a plan adds to the live
  // bytes of its step (rounding, fragmentation, other phases, the process) shows once it is planned: the most
  // live bytes whose plan fits are found by bisection.
  std::optional<Choice> choose(TrainOptions options) const {
    const DataShape data = planned_shape(options);
    const StepCosts costs = step_costs(options, data, machine_->device, world_size_);
    const auto denoiser = build_denoiser(
        options.model, denoiser_config_of(options, data, *make_objective(objective_config_of(options))),
        {.device = at::kMeta});
    std::optional<Choice> best;
    // Of the choices within `live_budget`: the live bytes of their step, and whether their plan fits.
    const auto try_within = [&](int64_t live_budget) -> std::pair<int64_t, bool> {
      const std::vector<MemoryChoice> choices = fit_memory(costs, live_budget);
      set_memory_choices(options, choices, *denoiser);
      Plan fitted = plan(options);
      const bool fits = needed(fitted) <= budget_;
      if (fits) best = Choice{options, std::move(fitted)};
      return {peak_bytes(costs, choices), fits};
    };
    int64_t fits = smallest_peak_bytes(costs);
    if (fits > budget_) return std::nullopt;
    const auto [most, most_fits] = try_within(budget_);
    if (most_fits) return best;
    int64_t too_much = most;
    if (fits >= too_much || !try_within(fits).second) return std::nullopt;
    while (too_much - fits > budget_ / kBudgetParts) {
      const int64_t middle = fits + (too_much - fits) / 2;
      const auto [live, middle_fits] = try_within(middle);
      if (middle_fits)
        fits = middle;
      else
        too_much = live;
    }
    return best;
  }

  // The same with the micro-batch chosen, too: halves of the rank's rows, the fastest step that fits.
  std::optional<Choice> choose_micro_batch(TrainOptions options) const {
    std::optional<Choice> best;
    const int64_t rows = rows_of_rank(options);
    for (int64_t images = rows; images >= 1; images = images == 1 ? 0 : (images + 1) / 2) {
      options.micro_batch = images < rows ? images : 0;
      std::optional<Choice> fitted = choose(options);
      if (!fitted) continue;
      const bool keeps_all =
          fitted->options.recompute == "none" && fitted->options.offload_activations == "none";
      if (!best || fitted->plan.step_s < best->plan.step_s) best = std::move(fitted);
      if (keeps_all) break;  // smaller passes only take longer
    }
    return best;
  }

  // Ends in the command of the largest micro-batch that fits, without a copy of the state where that does
  // not.
  [[noreturn]] void refuse(const TrainOptions& options, const std::string& what) const {
    TrainOptions smaller = options;
    for (const std::string& copy : {options.checkpoint_copy, std::string("page-cache")}) {
      smaller.checkpoint_copy = copy;
      smaller.micro_batch = options.micro_batch > 0 ? options.micro_batch : rows_of_rank(options);
      for (; smaller.micro_batch >= 1; smaller.micro_batch /= 2)
        if (const auto fitted = choose(smaller)) {
          TrainOptions nearest = fitted->options;
          if (nearest.micro_batch == nearest.global_batch) nearest.micro_batch = options.micro_batch;
          nearest.memory_budget = options.memory_budget;
          fail("train", "{}: this fits: {}", what, command_line(nearest));
        }
    }
    fail("train", "{}, nor does any smaller --micro-batch: take a smaller model or more memory", what);
  }

 private:
  int64_t rows_of_rank(const TrainOptions& options) const {
    return (options.global_batch + world_size_ - 1) / world_size_;
  }

  const MachineProfile* machine_;
  Process process_;
  int64_t budget_, world_size_;
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
  if (value.empty()) return "none";
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

std::string fitted_checkpoint_copy(const Plan& plan, int64_t host_bytes) {
  int64_t stepping = 0, most = 0;
  for (const PhasePlan& phase : plan.phases) {
    const int64_t bytes = phase.bytes.host + phase.bytes.pinned_host;
    if (phase.name != "checkpoint") stepping = std::max(stepping, bytes);
    most = std::max(most, bytes);
  }
  const std::string& asked = plan.options.train.checkpoint_copy;
  if (most <= host_bytes) return asked;
  if (asked == "auto" && stepping <= host_bytes) return "page-cache";
  if (stepping <= host_bytes)
    fail("train",
         "--checkpoint-copy memory needs {:.2f} GiB of the {:.2f} GiB of host memory that each rank has: "
         "--checkpoint-copy page-cache needs {:.2f} (--no-preflight tries anyway)",
         gib(most), gib(host_bytes), gib(stepping));
  fail("train",
       "it needs {:.2f} GiB of the {:.2f} GiB of host memory that each rank has: offload to nvme, fewer "
       "ranks on a "
       "machine, or a smaller --prefetch (--no-preflight tries anyway)",
       gib(stepping), gib(host_bytes));
}

namespace {

// Of a GPU's host: a copy of the state that does not fit is not made.
void fit_host(FittedRun& run, Plan plan, const MachineFit& fit, const Ranks& ranks) {
  const int64_t available = host_memory().available_bytes;
  if (plan.machine.device != DryRunDevice::kCuda || available == 0 || !run.options.preflight) return;
  const std::string copy =
      fitted_checkpoint_copy(plan, available / ranks.local_world_size + resident_bytes());
  if (copy == run.options.checkpoint_copy) return;
  run.options.checkpoint_copy = copy;
  run.predicted = to_json(fit.plan(run.options)).at("predicted");
}

// The fewest recomputed FLOPs within the budget, and when asked, or where nothing else fits and that is
// allowed, the micro-batch.
void choose_within(FittedRun& run, const MachineProfile& machine, int64_t budget, const Ranks& ranks,
                   const FitTerms& terms) {
  const TrainOptions& options = run.options;
  run.gives_memory_back = machine.device == DryRunDevice::kCpu;
  const Process process = run.gives_memory_back ? frugal_process(options, ranks) : Process{};
  const MachineFit fit(machine, process, budget, ranks.world_size);
  const std::string given = options.memory_budget.empty()
                                ? std::string("what is free")
                                : fmt::format("--memory-budget {}", options.memory_budget);
  const std::string size = fmt::format("{:.2f} GiB{}", gib(budget),
                                       run.gives_memory_back && ranks.local_world_size > 1
                                           ? fmt::format(" for each of {} ranks", ranks.local_world_size)
                                           : "");
  bool any_micro_batch = chooses_micro_batch(options);
  std::optional<Choice> fitted = any_micro_batch ? std::nullopt : fit.choose(options);
  any_micro_batch |= !fitted && terms.may_choose_micro_batch;
  if (any_micro_batch) fitted = fit.choose_micro_batch(options);
  if (!fitted && any_micro_batch)
    fail("train", "{} ({}) is too little for any --micro-batch: take a smaller model or more memory", given,
         size);
  if (!fitted)
    fit.refuse(options,
               fmt::format("{} ({}) is too little for --micro-batch {}", given, size, options.micro_batch));
  const auto& [chosen, plan] = *fitted;
  TrainOptions kept = chosen;
  kept.recompute = kept.offload_activations = "none";
  const double kept_s = fit.plan(kept).step_s;
  run.options = chosen;
  run.predicted = to_json(plan).at("predicted");
  run.summary = fmt::format(
      "memory budget {}:{} --recompute {} --offload-activations {}: {:.2f} GiB, {:.2f} GiB of it "
      "tensors; "
      "{:.0f} % more time per step than keeping all",
      size, any_micro_batch ? fmt::format(" --micro-batch {}", plan.micro_batch) : "", chosen.recompute,
      chosen.offload_activations, gib(fit.needed(plan)), gib(plan.peak_bytes),
      100 * (plan.step_s / kept_s - 1));
  fit_host(run, plan, fit, ranks);
}

// Without a budget a run stays as it is. On a CPU it gives freed memory back where it would come to hold too
// much.
void check_fit(FittedRun& run, const MachineProfile& machine, int64_t free, const Ranks& ranks,
               const FitTerms& terms) {
  const bool on_cpu = machine.device == DryRunDevice::kCpu;
  MachineFit fit(machine, on_cpu ? keeping_process(machine) : Process{}, free, ranks.world_size);
  const Plan plan = fit.plan(run.options);
  if (on_cpu && fit.needed(plan) > free) {
    run.gives_memory_back = true;
    fit = MachineFit(machine, frugal_process(run.options, ranks), free, ranks.world_size);
  }
  if (const int64_t needed = fit.needed(plan); needed > free) {
    const std::string what =
        fmt::format("it needs {:.2f} GiB of the {:.2f} GiB that are free", gib(needed), gib(free));
    if (!terms.may_choose_micro_batch) fit.refuse(run.options, what + " (--no-preflight tries anyway)");
    run.options.micro_batch = -1;
    choose_within(run, machine, free, ranks, terms);
    run.summary = fmt::format("in one pass {}; {}", what, run.summary);
    return;
  }
  run.predicted = to_json(plan).at("predicted");
  fit_host(run, plan, fit, ranks);
}

}  // namespace

FittedRun fit_run(const TrainOptions& options, const Ranks& ranks, const FitTerms& terms) {
  validate(options);
  const bool has_budget = !options.memory_budget.empty();
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  if (!has_budget && !options.preflight) return run;
  const int64_t asked =
      has_budget && options.memory_budget != "auto" ? parse_bytes(options.memory_budget) : 0;
  const at::Device device = parse_device(options.device, ranks.local_rank);
  const std::optional<MachineProfile> machine = profile_of(device);
  if (!machine) {
    if (has_budget)
      fail("train", "--memory-budget does not know this GPU ({}): kiln plan --calibrate measures it",
           machine_name(device));
    fmt::print(stderr,
               "warning: no profile of this GPU ({}): nothing tells whether the run fits before it starts; "
               "kiln plan --calibrate measures one\n",
               machine_name(device));
    return run;
  }
  const int64_t sharing = device.is_cpu() ? ranks.local_world_size : 1;  // the ranks of a machine: its memory
  const int64_t budget = asked > 0 ? asked / sharing : free_bytes(device, *machine, ranks, terms);
  if (has_budget)
    choose_within(run, *machine, budget, ranks, terms);
  else
    check_fit(run, *machine, budget, ranks, terms);
  return run;
}

FittedRun fit_run(const TrainOptions& options, ProcessGroup& group, const FitTerms& terms) {
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  as_rank(group, [&] {
    if (group.rank() == 0) run = fit_run(options, group.ranks(), terms);
  });
  const nlohmann::json fitted = to_json(run.options);
  nlohmann::json choices = {{"gives memory back", run.gives_memory_back}};
  for (const char* name : {"micro-batch", "recompute", "offload-activations", "checkpoint-copy"})
    choices["options"][name] = fitted.at(name);
  choices = nlohmann::json::parse(group.gather(choices.dump(), "the memory choices").front());
  for (const auto& [name, value] : choices.at("options").items()) set_option(run.options, name, value);
  run.gives_memory_back = choices.at("gives memory back");
  if (run.gives_memory_back) return_freed_memory();
  return run;
}

}  // namespace kiln
