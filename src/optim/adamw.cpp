#include "optim/adamw.h"

#include "core/error.h"
#include "core/json_config.h"

namespace kiln {

AdamWOptions parse_adamw(const nlohmann::json& config) {
  const JsonConfig reader("adamw", config);
  AdamWOptions options;
  const auto betas = reader.get("betas", std::vector<double>{options.beta1, options.beta2});
  if (betas.size() != 2) fail("adamw", "betas expects 2 numbers, got {}", betas.size());
  options.beta1 = betas[0];
  options.beta2 = betas[1];
  options.eps = reader.get("eps", options.eps);
  options.weight_decay = reader.get("weight_decay", options.weight_decay);
  for (double beta : {options.beta1, options.beta2})
    if (!(beta >= 0 && beta < 1)) fail("adamw", "betas must be in [0, 1), got {}", beta);
  if (!(options.eps >= 0)) fail("adamw", "eps must not be negative, got {}", options.eps);
  if (!(options.weight_decay >= 0))
    fail("adamw", "weight_decay must not be negative, got {}", options.weight_decay);
  return options;
}

ops::AdamWStep AdamWOptions::at(double lr, int64_t update, double grad_scale) const {
  return {.lr = lr,
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = eps,
          .weight_decay = weight_decay,
          .step = update,
          .grad_scale = grad_scale};
}

void AdamW::step(OptimizerSlice& slice, const OptimizerStep& step) const {
  ops::AdamWStep now = options_.at(step.lr, step.update, step.grad_scale);
  now.device_scale = step.device_scale;
  ops::adamw_ema_step_(slice.master, slice.grads, slice.moments.at(0), slice.moments.at(1), slice.emas,
                       slice.compute_weights, now);
}

}  // namespace kiln
