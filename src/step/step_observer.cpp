#include "step/step_observer.h"

namespace kiln {

std::string_view name_of(StepPhase phase) {
  constexpr std::string_view kNames[kNumStepPhases] = {"input",    "forward",   "loss",      "recompute",
                                                       "backward", "grad_norm", "optimizer", "communication",
                                                       "offload",  "graph"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace kiln
