#include "plan/search/candidates.h"

#include <algorithm>
#include <cmath>

#include "core/units.h"
#include "plan/price/attention_engine.h"
#include "plan/ranks/rank_step.h"

namespace kiln {

namespace {

constexpr double kHoursPerDay = 24;
// Screening equals a plan up to this share. What is screened further away from the best plan so far cannot
// win. Everything nearer is planned.
constexpr double kTolerance = 1e-3;

double needed_bytes(const Plan& plan) { return static_cast<double>(plan.needed_bytes); }

// Returns what a device must have, in steps of kToldApart. What its allocator caches besides goes back when
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

}  // namespace

const Goal kFastest = {"fastest that fits",
                       [](const Configuration& c) { return Figures(c.step_s, bytes_of(c)); },
                       [](const Plan& plan) { return Figures(plan.step_s, needed_bytes(plan)); }};
const Goal kCheapest = {"cheapest",
                        [](const Configuration& c) { return Figures(gpu_seconds(c), bytes_of(c)); },
                        [](const Plan& plan) { return Figures(gpu_seconds(plan), needed_bytes(plan)); }};
const Goal kLeastMemory = {
    "least memory", [](const Configuration& c) { return Figures(least_memory(bytes_of(c)), c.step_s); },
    [](const Plan& plan) { return Figures(least_memory(plan), plan.step_s); }};

Candidates::Candidates(const SearchOptions& options, const MachineProfile& machine, const DataOutlook& data,
                       SearchTraces& traces)
    : options_(options),
      machine_(machine),
      data_(data),
      traces_(traces),
      configurations_(configurations(options, machine, data_, traces)),
      most_share_(options.memory_share) {
  for (size_t i = 0; i < configurations_.size(); ++i)
    if (configurations_[i].step_s > 0) possible_.push_back(i);
  // If nothing leaves that much room, take what leaves a little, or else what leaves none.
  for (const double share : {kFullShare, 1.0})
    if (share > most_share_ && !best(kFastest, {})) most_share_ = share;
}

const Plan* Candidates::best(const Goal& goal, const Limits& limits, std::optional<int64_t> gpus) {
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

const Plan& Candidates::smallest() {
  const auto least = std::ranges::min_element(configurations_, {}, &Configuration::least_bytes);
  return planned(static_cast<size_t>(least - configurations_.begin()));
}

bool Candidates::fits(const Plan& plan) const {
  return plan.fits && static_cast<double>(plan.needed_bytes) <=
                          most_share_ * static_cast<double>(plan.machine.memory_bytes);
}

std::vector<size_t> Candidates::ranked(const Goal& goal) const {
  std::vector<size_t> order = possible_;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return goal.screened(configurations_[i]); });
  return order;
}

bool Candidates::may_meet(const Limits& limits, const Configuration& configuration) const {
  const PlanOptions& plan = options_.plan;
  const int64_t steps = plan.steps > 0 ? plan.steps : plan.train.max_steps;
  const double days = static_cast<double>(steps) * configuration.step_s * (1 - kTolerance) / kSecondsPerDay;
  return limits.met_by(
      days, days * kHoursPerDay * static_cast<double>(configuration.gpus) * plan.price_per_gpu_hour);
}

const Plan& Candidates::planned(size_t index) {
  const auto known = plans_.find(index);
  if (known != plans_.end()) return known->second;
  const PlanOptions options = options_of(options_, configurations_[index]);
  check_plan(options, machine_);
  const int64_t per_node = sharding_of(options.train, options.gpus, machine_).ranks_per_node;
  const StepTrace& trace = traces_.step(traced_options(options.train, machine_), data_.shape, machine_.device,
                                        options.gpus, per_node);
  return plans_.emplace(index, compose_plan(options, machine_, data_, trace)).first->second;
}

}  // namespace kiln
