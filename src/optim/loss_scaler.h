// Dynamic loss scaling (Micikevicius et al. 2018): fp16 gradients underflow unless the loss is multiplied
// first.
#pragma once
#include <cstdint>

namespace kiln {

struct LossScalerOptions {
  bool enabled = false;          // fp16 only; f32 and bf16 train with scale 1
  double initial_scale = 65536;  // 2^16
  double growth_factor = 2, backoff_factor = 0.5;
  int64_t growth_interval = 1000;  // finite steps in a row before the scale grows
  double min_scale = 1;
};

// REQUIRES: update() once per step. The state (scale, good_steps) belongs into checkpoints.
class LossScaler {
 public:
  explicit LossScaler(const LossScalerOptions& options = {})
      : options_(options), scale_(options.enabled ? options.initial_scale : 1) {}

  double scale() const { return scale_; }
  int64_t good_steps() const { return good_steps_; }
  void update(bool finite);
  // True when a non-finite gradient may be the scale's fault: it can still shrink.
  bool can_back_off() const { return options_.enabled && scale_ > options_.min_scale; }
  void restore(double scale, int64_t good_steps);

 private:
  LossScalerOptions options_;
  double scale_ = 1;
  int64_t good_steps_ = 0;
};

}  // namespace kiln
