// A comparison for the terminal and for scripts.
#include <fmt/format.h>

#include <algorithm>

#include "core/tensors.h"
#include "core/units.h"
#include "plan/run/make_plan.h"
#include "plan/run/plan.h"
#include "plan/search/comparison.h"
#include "plan/search/search.h"

namespace kiln {

namespace {

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
