#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace kiln {

namespace {

// Returns a factor in [0, 1]: 1 is the peak, 0 is peak * min_lr_ratio.
double shape_factor(LrShape shape, double progress) {
  switch (shape) {
    case LrShape::kConstant:
      return 1;
    case LrShape::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * progress));
    case LrShape::kLinear:
      return 1 - progress;
  }
  fail("lr_schedule", "unknown shape {}", static_cast<int>(shape));
}

// Returns a factor in (0, 1]: no step has a rate of 0.
double warmup_factor(const LrSchedule& schedule, int64_t step) {
  if (step >= schedule.warmup_steps) return 1;
  const auto steps = static_cast<double>(schedule.warmup_steps), s = static_cast<double>(step);
  return schedule.warmup == WarmupShape::kLog
             ? std::min(1.0, std::log(s + 2) / std::log(std::max(steps, 2.0)))
             : (s + 1) / steps;
}

}  // namespace

double lr_at(const LrSchedule& schedule, int64_t step, double progress) {
  const double factor = shape_factor(schedule.shape, std::clamp(progress, 0.0, 1.0));
  return schedule.peak * warmup_factor(schedule, step) *
         (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * factor);
}

void validate(const LrSchedule& schedule) {
  if (!(schedule.peak > 0) || !std::isfinite(schedule.peak))
    fail("train", "--lr must be a positive number, got {}", schedule.peak);
  if (schedule.warmup_steps < 0)
    fail("train", "--lr-warmup-steps must not be negative, got {}", schedule.warmup_steps);
  if (!(schedule.min_lr_ratio >= 0 && schedule.min_lr_ratio <= 1))
    fail("train", "--min-lr-ratio must be in [0, 1], got {}", schedule.min_lr_ratio);
}

}  // namespace kiln
