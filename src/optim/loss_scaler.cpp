#include "optim/loss_scaler.h"

#include <algorithm>

namespace kiln {

void LossScaler::update(bool finite) {
  if (!options_.enabled) return;
  if (!finite) {
    scale_ = std::max(options_.min_scale, scale_ * options_.backoff_factor);
    good_steps_ = 0;
  } else if (++good_steps_ >= options_.growth_interval) {
    scale_ *= options_.growth_factor;
    good_steps_ = 0;
  }
}

void LossScaler::restore(double scale, int64_t good_steps) {
  if (!options_.enabled) return;
  // A run that continues in fp16 after f32 or bf16 starts with the initial scale.
  scale_ = scale > 1 ? scale : options_.initial_scale;
  good_steps_ = good_steps;
}

}  // namespace kiln
