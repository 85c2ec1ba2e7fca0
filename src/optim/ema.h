// The decay of an exponential moving average at each update.
#pragma once
#include <cstdint>
#include <vector>

#include "core/choices.h"

namespace kiln {

// ema = d * ema + (1 - d) * weights after each applied update.
enum class EmaSchedule {
  kConstant,   // d = decay from the first update on; the average starts as a copy of the weights (DiT)
  kDiffusers,  // d = min(decay, (1 + n) / (10 + n)) after n updates, 0 at the first (diffusers' EMAModel), so
               // that short runs are not dominated by their start
};
template <>
struct Choices<EmaSchedule> {
  static constexpr std::pair<EmaSchedule, const char*> kAll[] = {{EmaSchedule::kConstant, "constant"},
                                                                 {EmaSchedule::kDiffusers, "diffusers"}};
};

struct EmaOptions {
  std::vector<double> decays = {0.9999};  // one average each
  EmaSchedule schedule = EmaSchedule::kConstant;
};
// Throws Error naming the option.
void validate(const EmaOptions& options);

// update: 1-based count of applied updates.
double ema_decay_at(EmaSchedule schedule, double decay, int64_t update);

}  // namespace kiln
