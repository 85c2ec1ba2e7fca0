// What the verbs loss and train share: an objective and its recorded timesteps.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "diffusion/objective.h"
#include "io.h"

namespace kiln::conformance {

struct RecordedObjective {
  std::unique_ptr<Objective> objective;
  bool is_iddpm = false;
  bool takes_uniforms = false;  // continuous flow: no table to index
  int64_t num_train_timesteps = 1000;

  // The timesteps in the form that the objective takes, of `sizes`: from `u`, or from indices `t` of the
  // schedule. Throws Error for indices outside of it, since the objectives do not look at values.
  at::Tensor timesteps(const Inputs& inputs, at::IntArrayRef sizes) const;
};

// config: as make_objective's. Throws Error.
RecordedObjective parse_objective(const nlohmann::json& config);

}  // namespace kiln::conformance
