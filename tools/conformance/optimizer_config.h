// The optimizer configs of the interface: {"type": "adamw", "lr", "betas", "eps", "weight_decay",
// "grad_clip"},
// {"type": "came", .. "clip_threshold", "variant"}.
#pragma once
#include <memory>

#include "core/json.h"
#include "core/json_config.h"
#include "optim/optimizer.h"

namespace kiln::conformance {

struct OptimizerConfig {
  std::unique_ptr<Optimizer> optimizer;
  double lr = 0;
  double max_grad_norm = 0;  // 0 = no clipping
};

// "grad_clip": absent or null is 0, no clipping. Throws Error unless it is above 0.
double max_grad_norm_of(const JsonConfig& config);

// Throws Error: no lr, a type that is unknown or not built by this version.
OptimizerConfig parse_optimizer(const nlohmann::json& config);

}  // namespace kiln::conformance
