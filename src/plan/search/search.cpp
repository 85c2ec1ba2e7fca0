#include "plan/search/search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"
#include "plan/run/make_plan.h"
#include "plan/trace/planned_data.h"
#include "run/train_command.h"

namespace kiln {

namespace {

constexpr double kHoursPerDay = 24;
// Screening equals a plan but for this: what is screened further away from the best plan so far cannot win.
// Everything nearer is planned.
constexpr double kTolerance = 1e-3;
// What would leave less of the memory is chosen only where nothing else fits.
constexpr double kMostShare = 0.97;

struct Limits {
  double days = 0, cost = 0;  // 0: none

  bool met_by(double planned_days, double planned_cost) const {
    return (days == 0 || planned_days <= days) && (cost == 0 || planned_cost <= cost);
  }
};

// What a goal minimises, and what decides where that is equal.
using Figures = std::pair<double, double>;
struct Goal {
  const char* name;
  Figures (*screened)(const Configuration&);
  Figures (*planned)(const Plan&);
};

double needed_bytes(const Plan& plan) { return static_cast<double>(plan.needed_bytes); }

// What a device must have, as far as it is told apart: what its allocator caches beside it goes back when
// memory runs out.
double least_memory(double bytes) {
  constexpr double kToldApart = 256 << 20;
  return std::ceil(bytes / kToldApart);
}
double least_memory(const Plan& plan) {
  int64_t bytes = plan.peak_bytes;
  for (const char* name : {"context", "communication"})
    if (const auto entry = plan.overhead.find(name); entry != plan.overhead.end()) bytes += entry->second;
  return least_memory(static_cast<double>(bytes));
}

double bytes_of(const Configuration& c) { return static_cast<double>(c.least_bytes); }
double gpu_seconds(const Configuration& c) { return static_cast<double>(c.gpus) * c.step_s; }
double gpu_seconds(const Plan& plan) { return static_cast<double>(plan.options.gpus) * plan.step_s; }

constexpr Goal kFastest = {"fastest that fits",
                           [](const Configuration& c) { return Figures(c.step_s, bytes_of(c)); },
                           [](const Plan& plan) { return Figures(plan.step_s, needed_bytes(plan)); }};
constexpr Goal kCheapest = {"cheapest",
                            [](const Configuration& c) { return Figures(gpu_seconds(c), bytes_of(c)); },
                            [](const Plan& plan) { return Figures(gpu_seconds(plan), needed_bytes(plan)); }};
constexpr Goal kLeastMemory = {
    "least memory", [](const Configuration& c) { return Figures(least_memory(bytes_of(c)), c.step_s); },
    [](const Plan& plan) { return Figures(least_memory(plan), plan.step_s); }};

class Search {
 public:
  Search(const SearchOptions& options, const MachineProfile& machine, const DataShape& data)
      : options_(options), configurations_(configurations(options, machine, data)) {
    for (size_t i = 0; i < configurations_.size(); ++i)
      if (configurations_[i].step_s > 0) possible_.push_back(i);
    if (!best(kFastest, {})) most_share_ = 1;
  }

  const std::vector<Configuration>& all() const { return configurations_; }

  // The plan of those that fit, with memory to spare, and meet `limits` with the lowest figure: that of
  // planning all of them. Null when there is none. `gpus`: of so many only.
  const Plan* best(const Goal& goal, const Limits& limits, std::optional<int64_t> gpus = {}) {
    const Plan* best = nullptr;
    for (size_t index : ranked(goal)) {
      const Configuration& configuration = configurations_[index];
      const Figures screened = goal.screened(configuration);
      if (best && screened.first * (1 - kTolerance) > goal.planned(*best).first) break;
      if (best && screened.first == goal.planned(*best).first &&
          screened.second * (1 - kTolerance) > goal.planned(*best).second)
        continue;
      if ((gpus && configuration.gpus != *gpus) || !may_meet(limits, configuration)) continue;
      const Plan& plan = planned(index);
      if (fits(plan) && limits.met_by(plan.days, plan.cost) &&
          (!best || goal.planned(plan) < goal.planned(*best)))
        best = &plan;
    }
    return best;
  }

  // The plan of what needs least, whether it fits or not.
  const Plan& smallest() {
    const auto least = std::ranges::min_element(configurations_, {}, &Configuration::least_bytes);
    return planned(static_cast<size_t>(least - configurations_.begin()));
  }

 private:
  bool fits(const Plan& plan) const {
    return plan.fits && static_cast<double>(plan.needed_bytes) <=
                            most_share_ * static_cast<double>(plan.machine.memory_bytes);
  }

  std::vector<size_t> ranked(const Goal& goal) const {
    std::vector<size_t> order = possible_;
    std::ranges::stable_sort(order, {}, [&](size_t i) { return goal.screened(configurations_[i]); });
    return order;
  }

  bool may_meet(const Limits& limits, const Configuration& configuration) const {
    const PlanOptions& plan = options_.plan;
    const int64_t steps = plan.steps > 0 ? plan.steps : plan.train.max_steps;
    const double days = static_cast<double>(steps) * configuration.step_s * (1 - kTolerance) / kSecondsPerDay;
    return limits.met_by(
        days, days * kHoursPerDay * static_cast<double>(configuration.gpus) * plan.price_per_gpu_hour);
  }

  const Plan& planned(size_t index) {
    const auto known = plans_.find(index);
    if (known != plans_.end()) return known->second;
    return plans_.emplace(index, make_plan(options_of(options_, configurations_[index]))).first->second;
  }

  const SearchOptions& options_;
  const std::vector<Configuration> configurations_;
  std::vector<size_t> possible_;  // within the memory, as far as screening tells
  std::map<size_t, Plan> plans_;
  double most_share_ = kMostShare;
};

void check(const SearchOptions& options, const MachineProfile& machine) {
  for (const auto& [name, value] :
       {std::pair{"deadline-days", options.deadline_days}, {"max-cost", options.max_cost}})
    if (!(value >= 0)) fail("plan", "--{} expects 0 or more, got {}", name, value);
  if (options.max_cost > 0 && options.plan.price_per_gpu_hour == 0)
    fail("plan", "--max-cost needs the price of a GPU: add --price-per-gpu-hour");
  PlanOptions checked = options.plan;
  if (options.any_gpus) checked.gpus = checked.train.zero.stage > 0 ? 2 : 1;
  check_plan(checked, machine);
}

std::string needs(const Plan& plan) {
  return fmt::format("{:.2f} of {:.2f} GiB", gib(plan.needed_bytes), gib(plan.machine.memory_bytes));
}

// The same configuration on the smallest GPU that it fits.
std::optional<Plan> on_larger_gpu(const Plan& plan) {
  std::vector<MachineProfile> machines = builtin_profiles();
  std::ranges::stable_sort(machines, {}, &MachineProfile::memory_bytes);
  const at::ScalarType dtype = plan.options.train.compute.product_dtype();
  for (const MachineProfile& machine : machines) {
    if (machine.memory_bytes <= plan.machine.memory_bytes || !machine.peak_flops.contains(dtype)) continue;
    PlanOptions options = plan.options;
    options.gpu = machine.name;
    Plan larger = make_plan(options);
    if (larger.fits) return larger;
  }
  return std::nullopt;
}

void explain_no_fit(SearchResult& result, Search& search) {
  const Plan& smallest = search.smallest();
  result.problem =
      fmt::format("nothing fits: of {} configurations the smallest needs {} of {} x {}", search.all().size(),
                  needs(smallest), smallest.options.gpus, smallest.machine.name);
  const std::optional<Plan> larger = on_larger_gpu(smallest);
  if (!larger) return;
  result.problem += fmt::format("; on {} x {} it fits, {}: {}", larger->options.gpus, larger->machine.name,
                                needs(*larger), launch_command(*larger));
  result.nearest.push_back({.goal = "nearest that fits", .plan = *larger});
}

// `limits` are not met by anything that fits: the fastest within the cost, else the cheapest, is nearest.
void explain_limits(SearchResult& result, Search& search, const Limits& limits) {
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
    had += fmt::format("{} costs {:.0f}", joint, nearest->cost);
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

SearchResult search(const SearchOptions& options) {
  SearchResult result{.options = options, .machine = planned_machine(options.plan)};
  check(options, result.machine);
  Search search(result.options, result.machine, planned_shape(options.plan.train));
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
  if (train.data.path.empty()) train.data.path = "store";
  if (train.out.empty()) train.out = "run";
  if (plan.options.steps > 0) train.max_steps = plan.options.steps;
  const int64_t gpus = plan.options.gpus, per_node = plan.machine.gpus_per_node;
  const bool one_machine = gpus <= per_node || plan.machine.device == DryRunDevice::kCpu;
  if (gpus > 1 && one_machine) train.ranks.nproc = gpus;
  const std::string command = command_line(train);
  if (one_machine) return command;
  int64_t nodes = (gpus + per_node - 1) / per_node;
  while (gpus % nodes != 0) ++nodes;  // as many ranks on each
  return fmt::format(
      "torchrun --no-python --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
      "{}",
      nodes, gpus / nodes, command);
}

}  // namespace kiln
