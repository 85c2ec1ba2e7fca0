// The learning rate of each step.
#pragma once
#include <cstdint>

#include "core/choices.h"

namespace kiln {

enum class LrShape { kConstant, kCosine, kLinear };
template <>
struct Choices<LrShape> {
  static constexpr std::pair<LrShape, const char*> kAll[] = {
      {LrShape::kConstant, "constant"}, {LrShape::kCosine, "cosine"}, {LrShape::kLinear, "linear"}};
};

enum class WarmupShape {
  kLinear,  // (step + 1) / warmup_steps
  kLog,     // log(step + 2) / log(warmup_steps)
};
template <>
struct Choices<WarmupShape> {
  static constexpr std::pair<WarmupShape, const char*> kAll[] = {{WarmupShape::kLinear, "linear"},
                                                                 {WarmupShape::kLog, "log"}};
};

struct LrSchedule {
  LrShape shape = LrShape::kConstant;  // times the warm-up
  double peak = 1e-4;                  // the highest rate
  WarmupShape warmup = WarmupShape::kLinear;
  int64_t warmup_steps = 0;  // 0: none
  double min_lr_ratio = 0;   // cosine and linear end at peak * min_lr_ratio
};

// step: 0-based. progress: fraction of the run that is done, in [0, 1], by steps or by time; cosine and
// linear follow it.
double lr_at(const LrSchedule& schedule, int64_t step, double progress);
// Throws Error naming the option.
void validate(const LrSchedule& schedule);

}  // namespace kiln
