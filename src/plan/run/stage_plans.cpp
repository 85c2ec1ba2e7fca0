#include "plan/run/make_plan.h"

#include "core/error.h"
#include "train/setup.h"
#include "train/stages/stages.h"

namespace kiln {

namespace {

// Returns the options of one stage. `model`: the config of the first stage's model; empty for the first
// stage.
PlanOptions options_of(const PlanOptions& options, size_t index, const std::string& model) {
  const StageOptions& stage = options.train.stages[index];
  PlanOptions of_stage = options;
  of_stage.train = options_of_stage(options.train, index);
  if (!model.empty()) of_stage.train.model.config = model;
  if (stage.steps > 0) of_stage.train.max_steps = stage.steps;
  of_stage.train = with_length(of_stage.train, options.dataset_size);
  return of_stage;
}

}  // namespace

StagePlans make_stage_plans(const PlanOptions& options, const std::function<Plan(const PlanOptions&)>& plan) {
  if (options.steps > 0)
    fail("plan", "--steps has no effect on a recipe of {} stages, each of which says its epochs or steps",
         options.train.stages.size());
  StagePlans stages;
  std::string model;
  for (size_t i = 0; i < options.train.stages.size(); ++i) {
    stages.names.push_back(stage_name(options.train.stages[i], i));
    try {
      stages.plans.push_back(plan(options_of(options, i, model)));
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({})", error.what(), stages.names.back()));
    }
    const Plan& of_stage = stages.plans.back();
    if (model.empty()) {
      const TrainOptions& train = of_stage.options.train;
      const auto objective = make_objective(objective_config_of(train.objective));
      model = denoiser_config_of(train, of_stage.data, *objective).dump();
    }
    if (of_stage.needed_bytes > stages.plans[stages.worst].needed_bytes) stages.worst = i;
    stages.steps += of_stage.steps;
    stages.days += of_stage.days;
    stages.cost += of_stage.cost;
    stages.fits = stages.fits && of_stage.fits;
  }
  return stages;
}

}  // namespace kiln
