#include "plan/search/search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/json_fields.h"
#include "core/tensors.h"
#include "core/units.h"
#include "plan/run/make_plan.h"
#include "plan/run/plan.h"
#include "plan/search/candidates.h"
#include "run/option_values.h"

namespace kiln {

namespace {

std::string needs(const Plan& plan) {
  return fmt::format("{:.2f} of {:.2f} GiB", gib(plan.needed_bytes), gib(plan.machine.memory_bytes));
}

// Plans the same configuration on the smallest GPU with more memory that it fits.
std::optional<Plan> on_larger_gpu(const Plan& plan, const DataOutlook& data) {
  std::vector<MachineProfile> machines = builtin_profiles();
  std::ranges::stable_sort(machines, {}, &MachineProfile::memory_bytes);
  const at::ScalarType dtype = plan.options.train.compute.product_dtype();
  for (const MachineProfile& machine : machines) {
    if (machine.memory_bytes <= plan.machine.memory_bytes || !machine.peak_flops.contains(dtype) ||
        !machine.runs_kiln)
      continue;
    PlanOptions options = plan.options;
    options.gpu = machine.name;
    Plan larger = plan_data(options, planned_machine(options), data);
    if (larger.fits) return larger;
  }
  return std::nullopt;
}

void explain_no_fit(SearchResult& result, Candidates& search) {
  const Plan& smallest = search.smallest();
  result.problem =
      fmt::format("nothing fits: of {} configurations the smallest needs {} of {} x {}", search.all().size(),
                  needs(smallest), smallest.options.gpus, smallest.machine.name);
  const std::optional<Plan> larger = on_larger_gpu(smallest, search.data());
  if (!larger) return;
  result.problem += fmt::format("; on {} x {} it fits, {}: {}", larger->options.gpus, larger->machine.name,
                                needs(*larger), launch_command(*larger));
  result.nearest.push_back({.goal = "nearest that fits", .plan = *larger});
}

// Explains that nothing that fits meets `limits`. The nearest is the fastest within the cost, else the
// cheapest.
void explain_limits(SearchResult& result, Candidates& search, const Limits& limits) {
  const Plan* nearest = limits.days > 0 ? search.best(kFastest, {.cost = limits.cost}) : nullptr;
  if (!nearest) nearest = search.best(kCheapest, {});
  std::string wanted, had;
  if (limits.days > 0) {
    wanted = fmt::format(" takes at most {:g} days", limits.days);
    had = fmt::format(" takes {:.1f} days", nearest->days);
  }
  if (limits.cost > 0) {
    const char* joint = limits.days > 0 ? " and" : "";
    wanted += fmt::format("{} costs at most {:g}", joint, limits.cost);
    had += fmt::format("{} costs {}", joint, cost_text(nearest->options, nearest->cost));
  }
  result.problem = fmt::format("nothing that fits{}: the nearest, {} x {},{}: {}", wanted,
                               nearest->options.gpus, nearest->machine.name, had, launch_command(*nearest));
  result.nearest.push_back({.goal = "nearest to the limits", .plan = *nearest});
}

void add_choice(std::vector<SearchChoice>& choices, const std::string& goal, const Plan& plan) {
  const std::string command = launch_command(plan);
  for (SearchChoice& choice : choices)
    if (launch_command(choice.plan) == command) {
      choice.goal += ", " + goal;
      return;
    }
  choices.push_back({.goal = goal, .plan = plan});
}

}  // namespace

void check_search(const SearchOptions& options, const MachineProfile& machine) {
  for (const auto& [name, value] :
       {std::pair{"deadline-days", options.deadline_days}, {"max-cost", options.max_cost}})
    if (!(value >= 0)) fail("plan", "--{} expects 0 or more, got {}", name, value);
  if (!(options.memory_share > 0 && options.memory_share <= 1))
    fail("plan", "--memory-share expects a share of the memory, above 0 and at most 1, got {}",
         options.memory_share);
  if (options.max_cost > 0 && options.plan.price_per_gpu_hour == 0)
    fail("plan", "--max-cost needs the price of a GPU: add --price-per-gpu-hour");
  if (!machine.runs_kiln)
    fail("plan", "this build does not run on a {}: its CUDA 13 begins with Turing (compute capability 7.5)",
         machine.name);
  PlanOptions checked = options.plan;
  if (options.any_gpus) checked.gpus = checked.train.zero.stage > 0 ? 2 : 1;
  check_plan(checked, machine);
}

SearchResult search(const SearchOptions& options) {
  SearchResult result{.options = options, .machine = planned_machine(options.plan)};
  check_search(options, result.machine);
  SearchTraces traces;
  Candidates search(result.options, result.machine, read_data_outlook(options.plan), traces);
  result.num_configurations = search.all().size();
  const Limits limits{.days = options.deadline_days, .cost = options.max_cost};
  for (const Goal& goal : {kFastest, kCheapest, kLeastMemory})
    if (const Plan* plan = search.best(goal, limits)) add_choice(result.best, goal.name, *plan);
  if (!result.best.empty() && options.any_gpus) {
    std::set<int64_t> counts;
    for (const Configuration& configuration : search.all()) counts.insert(configuration.gpus);
    for (int64_t gpus : counts)
      if (const Plan* plan = search.best(kFastest, limits, gpus))
        result.by_gpus.push_back({.goal = fmt::format("fastest on {}", gpus), .plan = *plan});
  }
  if (!result.best.empty()) return result;
  if (search.best(kFastest, {}))
    explain_limits(result, search, limits);
  else
    explain_no_fit(result, search);
  return result;
}

std::string launch_command(const Plan& plan) {
  TrainOptions train = plan.options.train;
  if (train.data.path.empty()) train.data.path = plan.samples.reads_pictures ? "pictures" : "store";
  if (train.out.empty()) train.out = "run";
  if (plan.options.steps > 0) train.max_steps = plan.options.steps;
  const int64_t gpus = plan.options.gpus, per_node = ranks_on_node(plan.machine, gpus);
  const bool one_machine = gpus == per_node;
  if (gpus > 1 && one_machine) train.ranks.nproc = gpus;
  std::string command = command_line(train);
  if (one_machine) return command;
  int64_t nodes = (gpus + per_node - 1) / per_node;
  while (gpus % nodes != 0) ++nodes;  // as many ranks on each
  return fmt::format(
      "torchrun --no-python --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
      "{}",
      nodes, gpus / nodes, command);
}

using Json = nlohmann::json;

Json choice_json(const SearchChoice& choice) {
  const Plan& plan = choice.plan;
  const TrainOptions& train = plan.options.train;
  Json json = {{"goal", choice.goal},
               {"command", launch_command(plan)},
               {"gpu", plan.machine.name},
               {"gpus", plan.options.gpus},
               {"compute_dtype", choice_name(train.compute.dtype)},
               {"recompute", train.memory.recompute.text()},
               {"zero_stage", train.zero.stage},
               {"offload_optimizer", choice_name(train.offload.optimizer)},
               {"offload_params", choice_name(train.offload.params)},
               {"offload_activations", train.memory.offload_activations.text()},
               {"data_bytes", plan.samples.disk_bytes()},
               {"data_bytes_per_s", plan.data_rate.bytes_per_s}};
  KILN_WRITE_FIELDS(json, plan, micro_batch, num_micro_steps, fits, needed_bytes, peak_bytes, step_s,
                    images_per_s, days, gpu_hours, cost, advice);
  return json;
}

namespace {

std::string figures(const Plan& plan) {
  return fmt::format(
      "{} s a step, {} images/s, {:.1f} of {:.1f} GiB ({:.0f} %), {} days, {} GPU hours{}",
      number_text(plan.step_s, 3), number_text(plan.images_per_s), gib(plan.needed_bytes),
      gib(plan.machine.memory_bytes),
      100 * static_cast<double>(plan.needed_bytes) / static_cast<double>(plan.machine.memory_bytes),
      number_text(plan.days, 3), number_text(plan.gpu_hours), cost_text(plan.options, plan.cost, ", cost "));
}

// Returns why a search has few configurations: it leaves the options alone that it was given.
std::string given_text(const std::set<std::string>& fixed) {
  return fixed.empty()
             ? ""
             : fmt::format(" ({} stay as given; what is not given is searched)", fmt::join(fixed, ", "));
}

Json choices_json(const std::vector<SearchChoice>& choices) {
  Json list = Json::array();
  for (const SearchChoice& choice : choices) list.push_back(choice_json(choice));
  return list;
}

}  // namespace

nlohmann::json to_json(const SearchResult& result) {
  return {{"fits", !result.best.empty()},      {"num_configurations", result.num_configurations},
          {"best", choices_json(result.best)}, {"by_gpus", choices_json(result.by_gpus)},
          {"problem", result.problem},         {"nearest", choices_json(result.nearest)}};
}

std::string to_text(const SearchResult& result) {
  if (!result.problem.empty()) return result.problem + "\n";
  const TrainOptions& train = result.options.plan.train;
  const Plan& first = result.best.front().plan;
  std::string text = fmt::format(
      "{}, {}, {} px, {} images a step, {} steps, on {}{} ({})\n{} configurations tried{}; the "
      "best of those that fit{}:\n",
      train.model.name, weights_text(first), train.data.image_size, train.global_batch, first.steps,
      result.options.any_gpus ? "" : fmt::format("{} x ", result.options.plan.gpus), result.machine.name,
      result.machine.source, result.num_configurations, given_text(result.options.fixed),
      result.options.deadline_days > 0 || result.options.max_cost > 0 ? " and meet the limits" : "");
  if (const std::string quality = quality_text(train, first.steps); !quality.empty())
    text += fmt::format("published FID of the model: {}\n", quality);
  for (const SearchChoice& choice : result.best)
    text += fmt::format("\n{}: {}\n  {}\n", choice.goal, figures(choice.plan), launch_command(choice.plan));
  if (!result.by_gpus.empty()) text += "\nThe fastest on each number of GPUs\n";
  for (const SearchChoice& choice : result.by_gpus)
    text += fmt::format("  {:>4}: {}\n        {}\n", choice.plan.options.gpus, figures(choice.plan),
                        launch_command(choice.plan));
  text += fmt::format("\nDisk: {}\n  {}\n", samples_text(first.samples), rate_text(first));
  if (!first.advice.empty()) text += fmt::format("\nAdvice on the {}\n", result.best.front().goal);
  for (const std::string& line : first.advice) text += "  - " + line + "\n";
  if (train.data.path.empty() || train.out.empty())
    text += "\nstore is a folder made by kiln extract, run the folder that the run is kept in";
  const bool uses_disk = text.find("--nvme-path nvme") != std::string::npos;
  if (uses_disk && train.offload.nvme.folder.empty())
    text += "; nvme is one on the disk that is offloaded to";
  if (text.back() != '\n') text += ".\n";
  return text;
}

}  // namespace kiln
