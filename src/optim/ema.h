// The decay of an exponential moving average at each update.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// ema = d * ema + (1 - d) * weights after each applied update. The names:
//   constant   d = decay from the first update on; the average starts as a copy of the weights (DiT).
//   diffusers  d = min(decay, (1 + n) / (10 + n)) after n updates, 0 at the first (diffusers' EMAModel), so
//   that
//              short runs are not dominated by their start.
// update: 1-based count of applied updates. Throws Error for an unknown schedule.
double ema_decay_at(const std::string& schedule, double decay, int64_t update);
std::vector<std::string> ema_schedule_names();

}  // namespace kiln
