#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace kiln {

namespace {

constexpr double kFactor = 2;  // by which the scale grows and shrinks

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options, bool enabled)
    : options_(options), is_dynamic_(enabled && options.fixed_scale == 0) {
  if (enabled) scale_ = is_dynamic_ ? options.initial_scale : options.fixed_scale;
}

void LossScaler::update(bool finite) {
  if (!is_dynamic_) return;
  if (!finite) {
    good_steps_ = 0;
    overflows_ = std::min(overflows_ + 1, options_.hysteresis);
    if (overflows_ == options_.hysteresis) scale_ = std::max(options_.min_scale, scale_ / kFactor);
    return;
  }
  if (options_.consecutive_hysteresis) overflows_ = 0;
  if (++good_steps_ <= options_.growth_interval) return;
  scale_ *= kFactor;
  good_steps_ = 1;
  overflows_ = 0;
}

void LossScaler::restore(double scale, int64_t good_steps, int64_t overflows) {
  if (!is_dynamic_) return;
  // If nothing was counted, the run trained in f32 or bf16 so far, and fp16 begins now.
  const bool was_enabled = scale != 1 || good_steps > 0 || overflows > 0;
  scale_ = was_enabled ? scale : options_.initial_scale;
  good_steps_ = good_steps;
  overflows_ = overflows;
}

void validate(const LossScalerOptions& options) {
  const auto require = [](bool holds, const char* option, const char* expected, auto value) {
    if (!holds) fail("train", "--{} expects {}, got {}", option, expected, value);
  };
  require(options.fixed_scale >= 0 && std::isfinite(options.fixed_scale), "loss-scale",
          "a positive number, or 0 for a dynamic one", options.fixed_scale);
  require(options.min_scale > 0, "loss-scale-min", "a positive number", options.min_scale);
  require(options.initial_scale >= options.min_scale && std::isfinite(options.initial_scale),
          "loss-scale-initial", "--loss-scale-min or more", options.initial_scale);
  require(options.growth_interval > 0, "loss-scale-window", "a positive number", options.growth_interval);
  require(options.hysteresis > 0, "loss-scale-hysteresis", "a positive number", options.hysteresis);
}

}  // namespace kiln
