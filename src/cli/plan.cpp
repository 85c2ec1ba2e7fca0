#include "core/command_line.h"
#include "plan/run/make_plan.h"

#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/units.h"
#include "parallel/machine.h"
#include "plan/fit/budget.h"
#include "plan/price/calibrate.h"
#include "plan/price/this_machine.h"
#include "plan/report/report.h"
#include "plan/search/comparison.h"
#include "plan/search/search.h"
#include "train/stages/stages.h"

namespace kiln::cli {

namespace {

constexpr const char* kExamples = R"(Examples
  Does DiT-XL/2 at 512 px train on four 24 GB cards, and how? This tries all ways and prints the best commands:
    kiln plan --search --model DiT-XL/2 --image-size 512 --gpu RTX-4090 --gpus 4
  Which DiT trains on two such cards in five days? Which cards train it, and what does each cost?
    kiln plan --search --model DiT --gpu RTX-4090 --gpus 2 --deadline-days 5
    kiln plan --search --model DiT-XL/2 --gpu any --gpus 2 --gpu-prices A100-80G=2,RTX-4090=0.5
  One way in detail: memory by kind and phase, time, cost, advice.
    kiln plan --model DiT-XL/2 --image-size 512 --gpu RTX-4090 --gpus 4 --compute-dtype bf16
  The same with eight images per pass, activations recomputed and the training state divided among the cards:
    kiln plan --model DiT-XL/2 --image-size 512 --gpu RTX-4090 --gpus 4 --compute-dtype bf16
      --micro-batch 8 --recompute all --zero-stage 2
  How many GPUs, and what does it cost, to be done in five days?
    kiln plan --search --model DiT-B/4 --gpu A100-80G --price-per-gpu-hour 2 --deadline-days 5
  The published run on 8 rented GPUs, with its cost:
    kiln plan --recipe recipes/dit-xl-2-256.toml --gpu A100-80G --gpus 8 --micro-batch 32 --price-per-gpu-hour 2
GPUs: RTX-2080-Ti, RTX-3060, RTX-3090, RTX-4060, RTX-4070, RTX-4090, RTX-5090, RTX-6000-Ada, V100, T4, L4, A10, A40, L40S,
A100-40G, A100-80G, A800-80G, H100, H200, B200, cpu (this machine); another card: --gpu-memory)";

// Returns the name of the profile of the device that kiln train would choose here. Throws Error.
std::string this_machine() {
  const at::Device device = choose_device(DeviceChoice::kAuto);
  if (device.is_cpu()) return "cpu";
  const std::optional<MachineProfile> profile = profile_of(device);
  if (!profile) fail("plan", "no profile of this GPU ({}): --calibrate measures one", machine_name(device));
  return profile->name;
}

// Returns the number of this machine's devices that a plan takes without --gpus, and says so if there are
// several.
int64_t gpus_here(const TrainOptions& train) {
  const int64_t present = num_devices(choose_device(DeviceChoice::kAuto));
  const int64_t gpus = planned_gpus(present, train.global_batch);
  if (present > 1)
    fmt::print(stderr, "note: this machine has {} GPUs, the plan is for {}{}\n", present, gpus,
               gpus < present ? fmt::format(", which divide --global-batch {}", train.global_batch)
                              : ": --gpus chooses another number");
  return gpus;
}

struct PlanArguments {
  std::set<std::string> given;  // given options of training
  PlanOptions options;
  bool json = false, calibrate = false, search = false;
  bool has_gpus = false;  // the number of GPUs is given, or counted on this machine
  SearchOptions limits;   // limits of the search; its plan is `options`
  double calibration_s = kCalibrationSeconds;
  double measure_s = 0;
  std::string html, table, gpu_prices;
};

void add_plan_options(CLI::App& command, PlanArguments& arguments) {
  PlanOptions& options = arguments.options;
  command.add_option("--gpu", options.gpu,
                     "GPU to train on, by its name below (default: the GPU of this machine, else its CPU); "
                     "--search also takes several with commas, or any");
  command.add_option("--gpu-memory", options.gpu_memory,
                     "Memory of one GPU (12G), for a card that is not built in; without --gpu it has the "
                     "speeds of the built-in card of the nearest memory");
  command.add_option("--gpus", options.gpus,
                     "Number of GPUs in all (default: those of this machine, 1 of another GPU; --search "
                     "tries 1, 2, 4, ...)");
  command.add_option("--gpus-per-node", options.gpus_per_node,
                     "GPUs of one machine; more are planned on several (default: 8 with NVLink, else 4)");
  command.add_option("--network-gbit", options.network_gbit,
                     "Network of one machine in Gbit/s, all its cards together (default: 200 or 400 for each "
                     "GPU with NVLink, else 100)");
  command.add_option("--steps", options.steps, "Steps to plan for (0: --max-steps)")->capture_default_str();
  command
      .add_option("--dataset-size", options.dataset_size,
                  "Number of images (0: those of --data, or ImageNet's)")
      ->capture_default_str();
  auto* search = command.add_flag(
      "--search", arguments.search,
      "Try every micro-batch, compute dtype, recompute set, ZeRO stage and offload that is not given, "
      "and print the commands of the fastest, the cheapest and the smallest run that fits");
  command
      .add_option("--deadline-days", arguments.limits.deadline_days, "--search: take at most this many days")
      ->needs(search);
  command
      .add_option("--max-cost", arguments.limits.max_cost,
                  "--search: cost at most this much (--price-per-gpu-hour)")
      ->needs(search);
  command
      .add_option("--gpu-prices", arguments.gpu_prices,
                  "--search: price of an hour of each kind of GPU: A100-80G=1.9,RTX-4090=0.4")
      ->needs(search);
  command
      .add_option("--memory-share", arguments.limits.memory_share,
                  "--search: use at most this share of a GPU's memory if anything fits in it (default: 0.85, "
                  "which leaves room for fragmentation and other programs; 0.97 of a --memory-budget)")
      ->needs(search);
  auto* table =
      command
          .add_option("--table", arguments.table,
                      "Print a Markdown table as in docs/plan_tables.md, for the GPU, batch, dtype "
                      "and steps given: sizes (every DiT), gpus (one run on 1 to 64), gpu-step (a step by "
                      "kinds of operations), options (fast-DiT's), results (DiT's FIDs), quoted, scaling")
          ->excludes(search);
  auto* calibrate = command.add_flag(
      "--calibrate", arguments.calibrate,
      "First measure this machine (--device says which) and keep its profile for later plans");
  command
      .add_option(
          "--calibrate-seconds", arguments.calibration_s,
          "--calibrate: time its steps for this long; a slow machine needs more to try all kinds of steps")
      ->needs(calibrate)
      ->capture_default_str();
  command
      .add_option("--measure-seconds", arguments.measure_s,
                  "If the profile of this machine lacks operations of the planned step, time them first, in "
                  "a few real steps of at most this many seconds in all, and keep them for later plans "
                  "(after --calibrate; 0: never)")
      ->excludes(search)
      ->excludes(table)
      ->capture_default_str();
  command.add_flag("--json", arguments.json, "Print one JSON object instead of text")->excludes(table);
  command
      .add_option("--html", arguments.html,
                  "Also write a report with plots into this file (--search: for the first run found)")
      ->excludes(table);
}

// Returns the price of an hour of one GPU, or rank. Throws Error.
double price_per_gpu_hour(const TrainOptions& train, int64_t gpus, bool is_number_known) {
  if (train.watch.cost_per_hour > 0 && !is_number_known)
    fail("plan", "--cost-per-hour needs a known number of GPUs: give --gpus, or --price-per-gpu-hour");
  return cost_per_hour_of(train.watch, gpus) / static_cast<double>(gpus);
}

void write_plan_report(const std::string& path, const Plan& plan) {
  if (!path.empty()) write_file_atomically("plan", path, to_html(plan));
}

// Prints one table that compares several models or kinds of GPU.
void compare(const PlanArguments& arguments, const ComparisonOptions& options) {
  const Comparison comparison = compare_runs(options);
  fmt::print("{}", arguments.json ? to_json(comparison).dump(1) + "\n" : to_text(comparison));
  if (comparison.ranked.empty() && !arguments.html.empty())
    fail("plan", "--html: there is no plan to write into {}", arguments.html);
  if (!comparison.ranked.empty()) write_plan_report(arguments.html, comparison.ranked.front().plan);
}

// Searches with the given options fixed; the search chooses the others.
void run_search(const CLI::App& command, const PlanArguments& arguments) {
  SearchOptions options = arguments.limits;
  options.plan = arguments.options;
  if (command.count("--memory-share") == 0 && options.plan.train.memory.budget.is_given())
    options.memory_share = kFullShare;  // the budget says how much may be used
  options.any_gpus = !arguments.has_gpus;
  for (const char* name : kSearchedOptions)
    if (arguments.given.contains(name)) options.fixed.insert(name);
  if (options.plan.train.chooses_micro_batch()) {  // The search chooses it anyway.
    options.plan.train.micro_batch = 0;
    options.fixed.erase("micro-batch");
  }
  const std::string &model = options.plan.train.model.name, &gpu = options.plan.gpu;
  ComparisonOptions compared{.search = options,
                             .models = models_named(model),
                             .gpus = gpus_named(gpu),
                             .prices = read_prices(arguments.gpu_prices),
                             .given = arguments.given};
  if (compared.models.size() > 1 || compared.gpus.size() > 1) return compare(arguments, compared);
  options.plan.train.model.name = compared.models.front();
  options.plan.train = as_published(std::move(options.plan.train), arguments.given);
  if (const auto price = compared.prices.find(compared.gpus.front()); price != compared.prices.end())
    options.plan.price_per_gpu_hour = price->second;
  const SearchResult result = search(options);
  fmt::print("{}", arguments.json ? to_json(result).dump(1) + "\n" : to_text(result));
  const std::vector<SearchChoice>& found = result.best.empty() ? result.nearest : result.best;
  if (!found.empty())
    write_plan_report(arguments.html, found.front().plan);
  else if (!arguments.html.empty())
    fail("plan", "--html: there is no plan to write into {}", arguments.html);
}

// Times what the profile of this machine lacks of the planned step, and stores it.
void measure_lacking(const PlanOptions& options, double seconds) {
  if (seconds == 0) return;
  if (!(seconds > 0)) fail("plan", "--measure-seconds expects 0 or more, got {}", seconds);
  MachineProfile machine = find_profile(options.gpu);
  const at::Device device = choose_device(options.train.compute.device);
  const bool is_device = device.is_cpu() == (machine.device == DryRunDevice::kCpu);
  if (!is_device || machine.machine != machine_name(device))
    fail("plan",
         "--measure-seconds measures the device it runs on, {}, which is not {}: --device chooses what it "
         "runs on, --gpu what is planned",
         machine_name(device), machine.name);
  if (!machine.measured)
    fail("plan", "--measure-seconds adds to the profile of a calibrated machine: --calibrate makes one");
  if (options.gpus > 1)
    fail("plan",
         "--measure-seconds measures the step of one rank, got --gpus {0}: leave out --measure-seconds or "
         "--gpus {0}",
         options.gpus);
  if (options.train.compute.tf32 && device.is_cuda())
    fail("plan", "--measure-seconds cannot store products in TF32: leave out --measure-seconds or --tf32");
  const DataShape data = describe(options.train).shape;
  const MeasuredStep measured =
      measure_step(machine, options.train, usual_shape(data).value_or(data), device, seconds);
  if (measured.is_done) store_profile(machine);
  if (has_clock(machine)) read_again(device);  // the plan's interval covers both moments
  fmt::print(stderr, "{}\n", measured.text);
}

// Plans the options as they are. With --memory-budget it plans what kiln train would choose, and prints that
// choice beside the plan.
Plan plan_of(PlanOptions options, double measure_s) {
  if (options.train.memory.budget.is_given()) {
    const MachineProfile machine = planned_machine(options);
    check_plan(options, machine);
    const FittedRun fitted = fit_planned(options.train, machine, options.gpus, options.change);
    fmt::print(stderr, "{}\n", fitted.summary);
    options.train = fitted.options;
  }
  measure_lacking(options, measure_s);
  return make_plan(options);
}

// With --calibrate, measures this machine before anything is planned, so that the plan uses the new profile.
void calibrate_here(const PlanArguments& arguments) {
  if (!arguments.calibrate) return;
  if (!(arguments.calibration_s > 0))
    fail("plan", "--calibrate-seconds expects a positive number, got {}", arguments.calibration_s);
  const TrainOptions& train = arguments.options.train;
  const MachineProfile profile =
      calibrate(choose_device(train.compute.device), arguments.calibration_s,
                {.data = train.data.folder(), .offloaded = train.offload.nvme.folder});
  for (const DiskSpeed& disk : profile.disks)
    fmt::print(stderr, "disk of {} ({}): {} MB/s read{}\n", disk.folder,
               disk.file_system.empty() ? "unknown file system" : disk.file_system,
               number_text(disk.read_bytes_per_s / 1e6, 3),
               disk.write_bytes_per_s > 0
                   ? fmt::format(", {} written", number_text(disk.write_bytes_per_s / 1e6, 3))
                   : "");
  const std::string path = store_profile(profile);
  fmt::print(stderr, "profile kept in {}\n", path);
}

void plan_all_stages(const PlanArguments& arguments) {
  if (arguments.search)
    fail("plan", "--search chooses the settings of one stage, this recipe has {}",
         arguments.options.train.stages.size());
  const StagePlans stages = make_stage_plans(
      arguments.options, [&](const PlanOptions& stage) { return plan_of(stage, arguments.measure_s); });
  fmt::print("{}", arguments.json ? to_json(stages).dump(1) + "\n" : to_text(stages));
  write_plan_report(arguments.html, stages.plans[stages.worst]);
}

void run(const CLI::App& command, const PlanArguments& arguments) {
  if (!arguments.table.empty()) {
    if (arguments.options.train.chooses_micro_batch())
      fail("plan", "--table plans what is given: give a --micro-batch");
    TableOptions table{.plan = arguments.options, .given = arguments.given};
    if (command.count("--gpu") > 0 || command.count("--gpu-memory") > 0) table.given.insert("gpu");
    fmt::print("{}", markdown_table(arguments.table, table));
    return;
  }
  if (!arguments.options.train.stages.empty()) return plan_all_stages(arguments);
  if (arguments.search) return run_search(command, arguments);
  Plan plan = plan_of(arguments.options, arguments.measure_s);
  add_lane_speeds(plan);
  compare_with_half_precision(plan);
  compare_with_keeping_all(plan);
  compare_with_published(plan);
  if (arguments.json)
    fmt::print("{}\n", to_json(plan).dump(1));
  else
    fmt::print("{}", to_text(plan));
  write_plan_report(arguments.html, plan);
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("plan",
                         "Say whether a training run fits, how fast it is and what it costs, without running "
                         "it; takes every option of kiln train (--data and --out may be left out)");
  auto arguments = std::make_shared<PlanArguments>();
  arguments->options.gpu = "this";
  add_plan_options(*command, *arguments);
  const auto train = add_train_options(*command, "kiln train");
  train->starts_ranks = false;
  command->footer(kExamples);
  show_first(*command, {"--gpu", "--gpu-memory", "--gpus", "--search", "--deadline-days", "--json", "--html",
                        "--recipe", "--model", "--image-size", "--global-batch", "--micro-batch",
                        "--compute-dtype", "--recompute", "--zero-stage"});
  command->callback([=] {
    PlanOptions& options = arguments->options;
    const bool has_gpus = command->count("--gpus") > 0;
    const ResolvedOptions resolved = resolve(*command, *train, has_gpus ? options.gpus : 0);
    if (!options.gpu_memory.empty() && command->count("--gpu") == 0)
      options.gpu = nearest_in_memory(MemoryBudget::parse_size("gpu-memory", options.gpu_memory),
                                      resolved.options.compute.product_dtype())
                        .name;
    options.train = with_length(resolved.options, options.dataset_size);
    options.change = resolved.change;
    calibrate_here(*arguments);
    const bool is_here = options.gpu == "this";
    if (is_here) options.gpu = this_machine();
    // The speed of this processor is measured with the threads that the run will have.
    if (options.gpu == "cpu") apply({.device = at::kCPU, .threads = options.train.compute.threads});
    arguments->given = resolved.given;
    if (!has_gpus && options.train.ranks.nproc > 0)
      options.gpus = options.train.ranks.nproc;
    else if (!has_gpus && is_here)
      options.gpus = gpus_here(options.train);
    arguments->has_gpus = has_gpus || options.gpus > 1 || options.train.ranks.nproc > 0;
    options.price_per_gpu_hour =
        price_per_gpu_hour(options.train, options.gpus, !arguments->search || arguments->has_gpus);
    run(*command, *arguments);
  });
}

}  // namespace kiln::cli
