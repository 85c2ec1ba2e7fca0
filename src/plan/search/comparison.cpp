#include "plan/search/comparison.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>
#include <optional>
#include <tuple>

#include "core/error.h"
#include "core/tensors.h"
#include "core/text/split.h"
#include "core/units.h"
#include "models/registry.h"
#include "plan/run/make_plan.h"
#include "plan/run/plan.h"
#include "plan/search/candidates.h"
#include "plan/search/search.h"
#include "run/published_settings.h"
#include "train/dataset/store_data.h"

namespace kiln {

namespace {

std::vector<std::string> names_in(const std::string& text) {
  std::vector<std::string> names = split(text, ',');
  std::erase(names, "");
  return names;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::ranges::find(names, name) == names.end()) names.push_back(name);
}

class Comparer {
 public:
  explicit Comparer(const ComparisonOptions& options) { result_.options = options; }

  Comparison run() {
    for (const std::string& model : result_.options.models) {
      OfModel shared;
      for (const std::string& gpu : result_.options.gpus) try_run(model, gpu, shared);
    }
    if (result_.ranked.empty() && first_error_) throw *first_error_;
    rank();
    return std::move(result_);
  }

 private:
  // What the searches of a model on several GPUs share.
  struct OfModel {
    std::optional<DataOutlook> data{};
    SearchTraces traces{};
  };

  void try_run(const std::string& model, const std::string& gpu, OfModel& shared) {
    try {
      add(model, gpu, shared);
    } catch (const Error& error) {
      result_.left_out.push_back(fmt::format("{} on {}: {}", model, gpu, error.what()));
      if (!first_error_) first_error_ = error;
    }
  }

  void add(const std::string& model, const std::string& gpu, OfModel& shared) {
    SearchOptions search = result_.options.search;
    search.plan.train.model.name = model;
    search.plan.train = as_published(std::move(search.plan.train), result_.options.given);
    search.plan.gpu = gpu;
    if (const auto price = result_.options.prices.find(gpu); price != result_.options.prices.end())
      search.plan.price_per_gpu_hour = price->second;
    const MachineProfile machine = planned_machine(search.plan);
    if (!machine.runs_kiln) {
      result_.left_out.push_back(
          fmt::format("{}: this build's CUDA 13 begins with Turing (compute capability 7.5)", machine.name));
      return;
    }
    check_search(search, machine);
    if (!shared.data) shared.data = read_data_outlook(search.plan);
    Candidates candidates(search, machine, *shared.data, shared.traces);
    result_.num_configurations += candidates.all().size();
    const Limits limits{.days = search.deadline_days, .cost = search.max_cost};
    const Goal& goal = search.any_gpus ? kCheapest : kFastest;
    if (const Plan* plan = candidates.best(goal, limits)) {
      result_.ranked.push_back({.plan = *plan});
      return;
    }
    // This one shows how far the limits are.
    if (const Plan* plan = candidates.best(search.deadline_days > 0 ? kFastest : kCheapest, {})) {
      result_.ranked.push_back({.plan = *plan, .meets = false});
      return;
    }
    const Plan& least = candidates.smallest();
    result_.left_out.push_back(fmt::format("{} on {}: needs {:.1f} of {:.1f} GiB at least", model,
                                           machine.name, gib(least.needed_bytes), gib(machine.memory_bytes)));
  }

  void rank() {
    const bool has_prices = std::ranges::any_of(
        result_.ranked, [](const ComparedRun& run) { return run.plan.options.price_per_gpu_hour > 0; });
    std::ranges::stable_sort(result_.ranked, {}, [&](const ComparedRun& run) {
      constexpr double kUnknown = std::numeric_limits<double>::infinity();
      const double cost = run.plan.options.price_per_gpu_hour > 0 ? run.plan.cost : kUnknown;
      return std::tuple(!run.meets, -run.plan.flops_per_image, has_prices ? cost : 0, run.plan.days);
    });
  }

  Comparison result_;
  std::optional<Error> first_error_;
};

constexpr size_t kMostCommands = 10;

std::string row(size_t rank, const ComparedRun& run) {
  const Plan& plan = run.plan;
  const std::string quality = quality_text(plan.options.train, plan.steps),
                    cost = cost_text(plan.options, plan.cost);
  return fmt::format(
      "{:>3}  {:<26}{:>4} x {:<14}{:>9}{:>10}  {:>5.1f} of {:>5.1f}{:>9}{:>9.0f}{:>8}{:>10.1f}{:>15}{}\n",
      rank, plan.options.train.model.name, plan.options.gpus, plan.machine.name, number_text(plan.step_s, 3),
      number_text(plan.images_per_s), gib(plan.needed_bytes), gib(plan.machine.memory_bytes),
      number_text(plan.days, 3), plan.gpu_hours, cost.empty() ? "-" : cost, gib(plan.samples.disk_bytes()),
      quality.empty() ? "-" : quality, run.meets ? "" : "  *");
}

}  // namespace

TrainOptions as_published(TrainOptions options, const std::set<std::string>& given) {
  if (!given.contains("image-size")) options.data.image_size = own_image_size(options);
  take_published_settings(options, given);
  return options;
}

std::vector<std::string> models_named(const std::string& text) {
  const std::vector<std::string> known = denoiser_names();
  std::vector<std::string> models;
  for (const std::string& part : names_in(text)) {
    if (std::ranges::find(known, part) != known.end()) {
      add_once(models, part);
      continue;
    }
    const size_t before = models.size();
    for (const std::string& name : known)
      if (lower(name).starts_with(lower(part)) && name != family_of(name).name) add_once(models, name);
    if (models.size() == before) family_of(part);  // throws
  }
  if (models.empty()) family_of(text);
  return models;
}

std::vector<std::string> gpus_named(const std::string& text) {
  std::vector<std::string> gpus;
  for (const std::string& part : names_in(text))
    if (lower(part) == "any")
      for (const MachineProfile& profile : builtin_profiles()) add_once(gpus, profile.name);
    else
      add_once(gpus, find_profile(part).name);
  if (gpus.empty()) find_profile(text);
  return gpus;
}

std::map<std::string, double> read_prices(const std::string& text) {
  std::map<std::string, double> prices;
  for (const std::string& part : names_in(text)) {
    const size_t sign = part.find('=');
    double price = 0;
    const char* const end = part.data() + part.size();
    if (sign != std::string::npos && std::from_chars(part.data() + sign + 1, end, price).ptr == end &&
        price > 0)
      prices[find_profile(part.substr(0, sign)).name] = price;
    else
      fail("plan", "--gpu-prices expects GPU=PRICE,GPU=PRICE, got '{}'", part);
  }
  return prices;
}

Comparison compare_runs(const ComparisonOptions& options) { return Comparer(options).run(); }

std::string to_text(const Comparison& comparison) {
  const PlanOptions& plan = comparison.options.search.plan;
  std::string text = fmt::format(
      "{} px, {} images a step, {} steps; {} configurations; models: {}, kinds of GPU: {}\n",
      plan.train.data.image_size, plan.train.global_batch, plan.steps > 0 ? plan.steps : plan.train.max_steps,
      comparison.num_configurations, comparison.options.models.size(), comparison.options.gpus.size());
  bool misses = false;
  if (!comparison.ranked.empty())
    text +=
        "\n  #  model                             GPUs           step s  images/s        GiB          days   "
        " GPU h    cost  data GiB  published FID\n";
  for (size_t i = 0; i < comparison.ranked.size(); ++i) {
    text += row(i + 1, comparison.ranked[i]);
    misses = misses || !comparison.ranked[i].meets;
  }
  if (misses) text += "  *  fits, but misses the deadline or the cost\n";
  if (comparison.ranked.empty()) text += "nothing fits\n";
  for (size_t i = 0; i < std::min(kMostCommands, comparison.ranked.size()); ++i)
    text += fmt::format("\n{}: {}\n", i + 1, launch_command(comparison.ranked[i].plan));
  if (!comparison.left_out.empty()) text += "\nLeft out\n";
  for (const std::string& line : comparison.left_out) text += "  " + line + "\n";
  return text;
}

nlohmann::json to_json(const Comparison& comparison) {
  nlohmann::json ranked = nlohmann::json::array();
  for (const ComparedRun& run : comparison.ranked) {
    ranked.push_back(
        choice_json({.goal = run.meets ? "meets the limits" : "misses the limits", .plan = run.plan}));
    ranked.back()["model"] = run.plan.options.train.model.name;
    ranked.back()["meets"] = run.meets;
    ranked.back()["published_fid"] = quality_text(run.plan.options.train, run.plan.steps);
  }
  return {{"num_configurations", comparison.num_configurations},
          {"ranked", ranked},
          {"left_out", comparison.left_out}};
}

}  // namespace kiln
