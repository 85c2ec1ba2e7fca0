// A search for the terminal and for scripts.
#include <fmt/ranges.h>

#include "core/tensors.h"
#include "core/units.h"
#include "plan/run/make_plan.h"
#include "plan/run/plan.h"
#include "plan/search/search.h"

namespace kiln {

using Json = nlohmann::json;

Json choice_json(const SearchChoice& choice) {
  const Plan& plan = choice.plan;
  const TrainOptions& train = plan.options.train;
  return {{"goal", choice.goal},
          {"command", launch_command(plan)},
          {"gpu", plan.machine.name},
          {"gpus", plan.options.gpus},
          {"micro_batch", plan.micro_batch},
          {"num_micro_steps", plan.num_micro_steps},
          {"compute_dtype", choice_name(train.compute.dtype)},
          {"recompute", train.memory.recompute.text()},
          {"zero_stage", train.zero.stage},
          {"offload_optimizer", choice_name(train.offload.optimizer)},
          {"offload_params", choice_name(train.offload.params)},
          {"offload_activations", train.memory.offload_activations.text()},
          {"fits", plan.fits},
          {"needed_bytes", plan.needed_bytes},
          {"peak_bytes", plan.peak_bytes},
          {"step_s", plan.step_s},
          {"images_per_s", plan.images_per_s},
          {"days", plan.days},
          {"gpu_hours", plan.gpu_hours},
          {"cost", plan.cost},
          {"data_bytes", plan.samples.disk_bytes()},
          {"data_bytes_per_s", plan.data_rate.bytes_per_s},
          {"advice", plan.advice}};
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
