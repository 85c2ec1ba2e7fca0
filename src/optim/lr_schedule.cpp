#include "optim/lr_schedule.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace kiln {

namespace {

struct NamedSchedule {
  const char* name;
  double (*factor)(double progress);  // in [0, 1]: 1 is lr, 0 is lr * min_lr_ratio
};

constexpr NamedSchedule kNamedSchedules[] = {
    {"constant", [](double) { return 1.0; }},
    {"cosine", [](double progress) { return 0.5 * (1 + std::cos(std::numbers::pi * progress)); }},
    {"linear", [](double progress) { return 1 - progress; }},
};

// In (0, 1]: never a step without a rate.
double warmup_factor(const LrSchedule& schedule, int64_t step) {
  if (step >= schedule.warmup_steps) return 1;
  const auto steps = static_cast<double>(schedule.warmup_steps), s = static_cast<double>(step);
  return schedule.warmup == "log" ? std::min(1.0, std::log(s + 2) / std::log(std::max(steps, 2.0)))
                                  : (s + 1) / steps;
}

}  // namespace

std::vector<std::string> lr_schedule_names() {
  std::vector<std::string> names;
  for (const NamedSchedule& entry : kNamedSchedules) names.push_back(entry.name);
  return names;
}

double lr_at(const LrSchedule& schedule, int64_t step, double progress) {
  const double warmup = warmup_factor(schedule, step);
  for (const NamedSchedule& entry : kNamedSchedules) {
    if (schedule.name != entry.name) continue;
    const double factor = entry.factor(std::clamp(progress, 0.0, 1.0));
    return schedule.lr * warmup * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * factor);
  }
  fail("lr_schedule", "expected one of {}, got '{}'", fmt::join(lr_schedule_names(), ", "), schedule.name);
}

void validate(const LrSchedule& schedule) {
  const auto names = lr_schedule_names();
  if (std::ranges::find(names, schedule.name) == names.end())
    fail("train", "--lr-schedule expects one of {}, got '{}'", fmt::join(names, ", "), schedule.name);
  if (!(schedule.lr > 0) || !std::isfinite(schedule.lr))
    fail("train", "--lr must be a positive number, got {}", schedule.lr);
  if (schedule.warmup_steps < 0)
    fail("train", "--lr-warmup-steps must not be negative, got {}", schedule.warmup_steps);
  if (schedule.warmup != "linear" && schedule.warmup != "log")
    fail("train", "--lr-warmup expects linear or log, got '{}'", schedule.warmup);
  if (!(schedule.min_lr_ratio >= 0 && schedule.min_lr_ratio <= 1))
    fail("train", "--min-lr-ratio must be in [0, 1], got {}", schedule.min_lr_ratio);
}

}  // namespace kiln
