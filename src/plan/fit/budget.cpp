#include "plan/fit/budget.h"

#include <ATen/DeviceAccelerator.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/memory_limits.h"
#include "core/units.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "plan/fit/machine_fit.h"
#include "plan/price/this_machine.h"
#include "plan/report/report.h"
#include "run/option_values.h"
#include "train/loop.h"
#include "train/setup.h"

namespace kiln {

CheckpointCopy fitted_checkpoint_copy(const Plan& plan, int64_t host_bytes) {
  int64_t stepping = 0, most = 0;
  for (const PhasePlan& phase : plan.phases) {
    const int64_t bytes = phase.bytes.host + phase.bytes.pinned_host;
    if (phase.name != "checkpoint") stepping = std::max(stepping, bytes);
    most = std::max(most, bytes);
  }
  const CheckpointCopy asked = plan.options.train.checkpoints.copy;
  if (most <= host_bytes) return asked;
  if (asked == CheckpointCopy::kAuto && stepping <= host_bytes) return CheckpointCopy::kPageCache;
  if (stepping <= host_bytes)
    fail("train",
         "--checkpoint-copy memory needs {:.2f} GiB of the {:.2f} GiB of host memory that each rank has: "
         "--checkpoint-copy page-cache needs {:.2f}, and --no-preflight tries anyway",
         gib(most), gib(host_bytes), gib(stepping));
  fail("train",
       "a rank needs {:.2f} GiB of the {:.2f} GiB of host memory that each rank has: offload to nvme, take "
       "fewer ranks on a machine or a smaller --prefetch; --no-preflight tries anyway",
       gib(stepping), gib(host_bytes));
}

namespace {

// Returns the bytes that this process may come to hold on `device`: what is free, and what it already holds.
// Local ranks share the host's memory.
int64_t free_bytes(at::Device device, const MachineProfile& machine, const Ranks& ranks,
                   const FitTerms& terms) {
  if (device.is_cuda())  // asking creates the context, which the plan counts too
    return static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first) + machine.context_bytes;
  const int64_t host = terms.host_bytes > 0 ? terms.host_bytes : host_memory().available_bytes;
  return host / ranks.local_world_size + resident_bytes();
}

// Returns what `fitting` changes: options as on a command line, or with commas if keys of a file are among
// them.
std::string changes_text(const TrainOptions& options, const TrainOptions& fitting,
                         const SettingText& change) {
  const nlohmann::json before = to_json(options), after = to_json(fitting);
  std::vector<std::string> texts;
  bool is_in_file = false;
  for (const auto& [name, value] : after.items()) {
    if (before.at(name) == value) continue;
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    texts.push_back(change(name, text));
    is_in_file |= texts.back() != option_on_command_line(name, text);
  }
  return fmt::format("{}", fmt::join(texts, is_in_file ? ", " : " "));
}

// Throws an Error that ends in the nearest options that fit, or else in the least memory that is enough.
// `sharing`: ranks that share a budget.
[[noreturn]] void refuse(const MachineFit& fit, const TrainOptions& options, int64_t sharing,
                         const FitTerms& terms, const std::string& what) {
  const auto what_fits = [&](TrainOptions fitting) {
    const double needed = gib(fit.needed(fit.plan(fitting)));
    fitting.memory.budget = options.memory.budget;
    return fmt::format("this fits, {:.2f} GiB: {}", needed, changes_text(options, fitting, terms.change));
  };
  if (!options.chooses_micro_batch())
    if (const std::optional<TrainOptions> nearest = fit.nearest(options))
      fail("train", "{}: {}", what, what_fits(*nearest));
  if (const std::optional<TrainOptions> offloaded = fit.nearest_offloaded(options))
    fail("train", "{}; no smaller --micro-batch fits either, with the optimizer's state elsewhere {}", what,
         what_fits(*offloaded));
  const int64_t mebibytes = (fit.least(options) * sharing + kMiB - 1) / kMiB;
  fail("train",
       "{}; no smaller --micro-batch fits either, nor the optimizer's state elsewhere: the least that works "
       "is --memory-budget {}M {}; else take a smaller model or more memory",
       what, mebibytes, terms.change("micro-batch", "-1"));
}

// Gives up the copy of the state in the host memory of a GPU if it does not fit there.
void fit_host(FittedRun& run, const Plan& plan, const MachineFit& fit, const Ranks& ranks) {
  const int64_t available = host_memory().available_bytes;
  if (plan.machine.device != DryRunDevice::kCuda || available == 0 || !run.options.memory.preflight) return;
  const CheckpointCopy copy =
      fitted_checkpoint_copy(plan, available / ranks.local_world_size + resident_bytes());
  if (copy == run.options.checkpoints.copy) return;
  run.options.checkpoints.copy = copy;
  run.predicted = to_json(fit.plan(run.options)).at("predicted");
}

// True if a choice is nearly as fast as unlimited memory would be.
bool is_about_the_fastest(const FittedChoice& fitted, const MachineFit& fit, bool any_micro_batch) {
  constexpr double kMostSlower = 1.03;
  TrainOptions unlimited = fitted.options;
  unlimited.memory.recompute = unlimited.memory.offload_activations = {};
  if (any_micro_batch) unlimited.micro_batch = 0;
  return fitted.plan.step_s <= kMostSlower * fit.plan(unlimited).step_s;
}

// Chooses the fewest recomputed FLOPs within the budget. Also chooses the micro-batch if asked, or if nothing
// else fits and that is allowed. On a CPU, giving freed memory back at once costs up to as much time again,
// so this happens only if a process that keeps it would not fit at full speed.
void choose_within(FittedRun& run, const MachineProfile& machine, const DataOutlook& data, int64_t budget,
                   const Ranks& ranks, const FitTerms& terms) {
  const TrainOptions& options = run.options;
  const bool on_cpu = machine.device == DryRunDevice::kCpu;
  bool any_micro_batch = options.chooses_micro_batch();
  MachineFit fit(machine, data, on_cpu ? keeping_process(machine) : ProcessMemory{}, budget,
                 ranks.world_size);
  const auto choose = [&] { return any_micro_batch ? fit.choose_micro_batch(options) : fit.choose(options); };
  std::optional<FittedChoice> fitted = choose();
  if (on_cpu && !(fitted && is_about_the_fastest(*fitted, fit, any_micro_batch))) {
    run.gives_memory_back = true;
    return_freed_memory();
    fit = MachineFit(machine, data, frugal_process(options), budget, ranks.world_size);
    fitted = choose();
  }
  if (!fitted && !any_micro_batch && terms.may_choose_micro_batch) {
    any_micro_batch = true;
    fitted = choose();
  }
  const std::string given = options.memory.budget.is_given()
                                ? fmt::format("--memory-budget {}", options.memory.budget.text())
                                : std::string("what is free");
  const std::string size = fmt::format("{:.2f} GiB{}", gib(budget),
                                       on_cpu && ranks.local_world_size > 1
                                           ? fmt::format(" for each of {} ranks", ranks.local_world_size)
                                           : "");
  const int64_t sharing = on_cpu ? ranks.local_world_size : 1;
  if (!fitted && any_micro_batch)
    refuse(fit, options, sharing, terms,
           fmt::format("{} ({}) is too little for any --micro-batch", given, size));
  const std::string one_pass =
      ranks.world_size > 1
          ? fmt::format("one pass of the {} images of a rank", rows_of_walk(options, ranks.world_size))
          : fmt::format("one pass of all --global-batch {}", options.global_batch);
  if (!fitted)
    refuse(fit, options, sharing, terms,
           fmt::format(
               "{} ({}) is too little for {}", given, size,
               options.micro_batch > 0 ? fmt::format("--micro-batch {}", options.micro_batch) : one_pass));
  const auto& [chosen, plan] = *fitted;
  TrainOptions kept = chosen;
  kept.memory.recompute = kept.memory.offload_activations = {};
  const double kept_s = fit.plan(kept).step_s;
  run.options = chosen;
  run.predicted = to_json(plan).at("predicted");
  run.summary = fmt::format(
      "memory budget {}:{} --recompute {} --offload-activations {}: {:.2f} GiB, {:.2f} GiB of it tensors; "
      "{:.0f} % more time per step than keeping all",
      size, any_micro_batch ? fmt::format(" --micro-batch {}", plan.micro_batch) : "",
      chosen.memory.recompute.text(), chosen.memory.offload_activations.text(), gib(fit.needed(plan)),
      gib(plan.peak_bytes), 100 * (plan.step_s / kept_s - 1));
  fit_host(run, plan, fit, ranks);
}

// Checks a run without a budget, which stays as it is. On a CPU it gives freed memory back if it would come
// to hold too much otherwise.
void check_fit(FittedRun& run, const MachineProfile& machine, const DataOutlook& data, int64_t free,
               const Ranks& ranks, const FitTerms& terms) {
  const bool on_cpu = machine.device == DryRunDevice::kCpu;
  MachineFit fit(machine, data, on_cpu ? keeping_process(machine) : ProcessMemory{}, free, ranks.world_size);
  Plan plan = fit.plan(run.options);
  UntriedGpu& untried = run.options.compute.untried_gpu;
  if (untried.has(Untried::kKeepGelu) && fit.needed(plan) > free) {
    untried.leave_out(Untried::kKeepGelu);
    plan = fit.plan(run.options);
    run.summary = "--untried-gpu leaves keep-gelu out, for which no memory is free";
  }
  if (on_cpu && fit.needed(plan) > free) {
    run.gives_memory_back = true;
    return_freed_memory();
    fit = MachineFit(machine, data, frugal_process(run.options), free, ranks.world_size);
  }
  if (const int64_t needed = fit.needed(plan); needed > free) {
    const std::string what =
        fmt::format("the run needs {:.2f} GiB of the {:.2f} GiB that are free", gib(needed), gib(free));
    if (!terms.may_choose_micro_batch)
      refuse(fit, run.options, on_cpu ? ranks.local_world_size : 1, terms,
             what + " (--no-preflight tries anyway)");
    run.options.micro_batch = -1;
    choose_within(run, machine, data, free, ranks, terms);
    run.summary = fmt::format("in one pass {}; {}", what, run.summary);
    return;
  }
  run.predicted = to_json(plan).at("predicted");
  run.needed_bytes = fit.needed(plan);
  run.free_bytes = free;
  run.rows = plan.micro_batch;
  fit_host(run, plan, fit, ranks);
}

}  // namespace

MemoryShare memory_share(const FittedRun& run, const SettingText& change) {
  constexpr double kMuchMemory = 0.85;  // as in the plan's advice
  if (run.free_bytes == 0) return {};
  const double share = static_cast<double>(run.needed_bytes) / static_cast<double>(run.free_bytes);
  MemoryShare shown{.text = fmt::format("memory: {:.2f} of the {:.2f} GiB that are free ({:.0f} %)",
                                        gib(run.needed_bytes), gib(run.free_bytes), 100 * share),
                    .warning = {}};
  if (share <= kMuchMemory) return shown;
  std::vector<std::string> ways;
  if (run.rows > 1) ways.push_back(change("micro-batch", std::to_string(run.rows / 2)));
  if (!run.options.memory.recompute.is_all()) ways.push_back(change("recompute", "all"));
  shown.warning = fmt::format(
      "{:.0f} % of the memory that is free will be used, which leaves little for other programs and "
      "fragmentation: {}",
      100 * share,
      ways.empty() ? "end other programs, or take a smaller model"
                   : fmt::format("{}", fmt::join(ways, " or ")));
  return shown;
}

FittedRun fit_run(const TrainOptions& options, const Ranks& ranks, const FitTerms& terms) {
  validate(options);
  const bool has_budget = options.memory.budget.is_given();
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  if (!has_budget && !options.memory.preflight) return run;
  const int64_t asked = options.memory.budget.bytes();
  const at::Device device = choose_device(options.compute.device, ranks.local_rank);
  // On a CPU, measurements from here on use the threads that the run will use.
  if (device.is_cpu())
    apply(
        ComputeSettings{.device = device, .threads = options.compute.threads, .cpu_share = terms.cpu_share});
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
  run.speed = describe(machine->speed);
  // The ranks of a machine share its memory.
  const int64_t sharing = device.is_cpu() ? ranks.local_world_size : 1;
  const int64_t budget = asked > 0 ? asked / sharing : free_bytes(device, *machine, ranks, terms);
  const DataOutlook data = read_data_outlook({.train = options});
  if (has_budget)
    choose_within(run, *machine, data, budget, ranks, terms);
  else
    check_fit(run, *machine, data, budget, ranks, terms);
  return run;
}

FittedRun fit_planned(const TrainOptions& options, const MachineProfile& machine, int64_t gpus,
                      const SettingText& change) {
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  const bool on_cpu = machine.device == DryRunDevice::kCpu;
  // GPU ranks are planned for another machine, whose host is not known.
  Ranks ranks;
  ranks.world_size = gpus;
  ranks.local_world_size = on_cpu ? gpus : 1;
  run.options.memory.preflight = on_cpu;
  if (on_cpu) apply(ComputeSettings{.device = at::kCPU, .threads = options.compute.threads});
  const int64_t asked = options.memory.budget.bytes();
  const int64_t budget = asked > 0 ? asked / ranks.local_world_size
                         : on_cpu  ? free_bytes(at::kCPU, machine, ranks, {})
                                   : machine.memory_bytes;
  choose_within(run, machine, read_data_outlook({.train = options}), budget, ranks, {.change = change});
  run.options.memory.preflight = options.memory.preflight;
  return run;
}

FittedRun fit_run(const TrainOptions& options, ProcessGroup& group, FitTerms terms) {
  terms.cpu_share = cpu_share(group);
  FittedRun run{.options = options, .predicted = nullptr, .summary = {}};
  as_rank(group, [&] {
    if (group.rank() == 0) run = fit_run(options, group.ranks(), terms);
  });
  const nlohmann::json fitted = to_json(run.options);
  nlohmann::json choices = {{"gives memory back", run.gives_memory_back}};
  for (const char* name :
       {"micro-batch", "recompute", "offload-activations", "untried-gpu", "checkpoint-copy"})
    choices["options"][name] = fitted.at(name);
  choices = nlohmann::json::parse(group.gather(choices.dump(), "the memory choices").front());
  for (const auto& [name, value] : choices.at("options").items()) set_option(run.options, name, value);
  run.gives_memory_back = choices.at("gives memory back");
  if (run.gives_memory_back) return_freed_memory();
  return run;
}

}  // namespace kiln
