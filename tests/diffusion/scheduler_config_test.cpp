// Objectives in diffusers' scheduler_config.json.
#include "diffusion/scheduler_config.h"

#include <gtest/gtest.h>

#include "diffusion/objective.h"

namespace kiln {
namespace {

using nlohmann::json;

TEST(SchedulerConfig, TellsTheObjective) {
  const json flow =
      objective_of_scheduler({{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"shift", 3.0}});
  EXPECT_EQ(flow.at("type"), "flow");
  EXPECT_EQ(flow.at("shift"), 3.0);
  EXPECT_EQ(objective_of_scheduler({{"_class_name", "DPMSolverMultistepScheduler"},
                                    {"prediction_type", "flow_prediction"},
                                    {"flow_shift", 4.0}})
                .at("shift"),
            4.0);
  const json v = objective_of_scheduler({{"_class_name", "DDIMScheduler"},
                                         {"prediction_type", "v_prediction"},
                                         {"beta_schedule", "scaled_linear"},
                                         {"beta_start", 0.00085},
                                         {"beta_end", 0.012}});
  EXPECT_EQ(v.at("prediction_type"), "v_prediction");
  EXPECT_EQ(v.at("beta_end"), 0.012);
  EXPECT_TRUE(objective_of_scheduler({{"_class_name", "X"}, {"prediction_type", "score"}}).is_null());
}

TEST(SchedulerConfig, SchedulesAreComparedByWhatDraws) {
  const json flow = {{"type", "flow"}, {"shift", 3.0}, {"timestep_sampling", "logit_normal"}};
  EXPECT_TRUE(have_same_schedule(flow, {{"type", "flow"}, {"shift", 3}}));
  EXPECT_FALSE(have_same_schedule(flow, {{"type", "flow"}, {"shift", 1.0}}));
  EXPECT_FALSE(have_same_schedule(flow, objective_config("epsilon")));
  EXPECT_TRUE(have_same_schedule(objective_config("iddpm"), objective_config("epsilon")));
  EXPECT_FALSE(have_same_schedule(objective_config("v_prediction"), objective_config("epsilon")));
  json ranged = objective_config("epsilon");
  ranged["beta_end"] = 0.012;
  EXPECT_FALSE(have_same_schedule(ranged, objective_config("epsilon")));
}

}  // namespace
}  // namespace kiln
