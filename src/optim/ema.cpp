#include "optim/ema.h"

#include <algorithm>

#include "core/error.h"

namespace kiln {

void validate(const EmaOptions& options) {
  for (double decay : options.decays) {
    if (!(decay >= 0 && decay < 1)) fail("train", "--ema-decay expects numbers in [0, 1), got {}", decay);
    if (std::ranges::count(options.decays, decay) > 1)
      fail("train", "--ema-decay expects different decays, got {} twice", decay);
  }
}

double ema_decay_at(EmaSchedule schedule, double decay, int64_t update) {
  if (schedule == EmaSchedule::kConstant) return decay;
  const double n = static_cast<double>(update - 1);
  return n <= 0 ? 0.0 : std::min(decay, (1 + n) / (10 + n));
}

}  // namespace kiln
