// The plans of a run's stages, for the terminal and as JSON.
#include <fmt/format.h>

#include "core/units.h"
#include "plan/report/report.h"
#include "plan/run/plan.h"

namespace kiln {

std::string to_text(const StagePlans& stages) {
  std::string text = fmt::format("{:<24}{:>8}{:>8}{:>12}{:>12}{:>12}{:>12}{:>12}\n", "", "px", "steps", "GiB",
                                 "s/step", "images/s", "hours", "data GiB");
  for (size_t i = 0; i < stages.plans.size(); ++i) {
    const Plan& plan = stages.plans[i];
    text += fmt::format("{:<24}{:>8}{:>8}{:>12.2f}{:>12}{:>12}{:>12}{:>12}{}\n", stages.names[i],
                        plan.options.train.data.image_size, plan.steps, gib(plan.needed_bytes),
                        number_text(plan.step_s), number_text(plan.images_per_s), number_text(plan.days * 24),
                        number_text(gib(plan.samples.disk_bytes())), plan.fits ? "" : "  DOES NOT FIT");
  }
  text += fmt::format(
      "all {} stages: {} steps in {} hours ({} days){}; the most memory in {}:\n\n", stages.plans.size(),
      stages.steps, number_text(stages.days * 24), number_text(stages.days, 3),
      cost_text(stages.plans.front().options, stages.cost, ", cost "), stages.names[stages.worst]);
  return text + to_text(stages.plans[stages.worst]);
}

nlohmann::json to_json(const StagePlans& stages) {
  nlohmann::json plans = nlohmann::json::array();
  for (size_t i = 0; i < stages.plans.size(); ++i) {
    plans.push_back(to_json(stages.plans[i]));
    plans.back()["name"] = stages.names[i];
  }
  return {{"stages", plans},
          {"fits", stages.fits},
          {"needed_bytes", stages.plans[stages.worst].needed_bytes},
          {"worst_stage", stages.worst + 1},
          {"steps", stages.steps},
          {"days", stages.days},
          {"cost", stages.cost}};
}

}  // namespace kiln
