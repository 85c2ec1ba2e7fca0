// Loss scaling (Micikevicius et al. 2018): fp16 gradients underflow unless the loss is multiplied first.
#pragma once
#include <cstdint>

namespace kiln {

struct LossScalerOptions {
  double fixed_scale = 0;  // 0: dynamic, by the options below
  double initial_scale = 65536;
  double min_scale = 1;
  // The scale doubles after this many finite steps, not counting the first one after an overflow.
  int64_t growth_interval = 1000;
  int64_t hysteresis = 1;  // how many overflows halve the scale for the first time
  // A finite step resets the count of overflows; otherwise only a doubling does.
  bool consecutive_hysteresis = false;
};

// DeepSpeed's DynamicLossScaler, step for step. REQUIRES: update() once per step. The state (scale,
// good_steps, overflows) belongs into checkpoints.
class LossScaler {
 public:
  // `enabled`: fp16 only; f32 and bf16 train with scale 1.
  explicit LossScaler(const LossScalerOptions& options = {}, bool enabled = false);

  double scale() const { return scale_; }
  int64_t good_steps() const { return good_steps_; }
  int64_t overflows() const { return overflows_; }
  void update(bool finite);
  // True if the loss scale `scale` alone may have made a gradient infinite: it can still shrink.
  bool explains_overflow(double scale) const { return is_dynamic_ && scale > options_.min_scale; }
  void restore(double scale, int64_t good_steps, int64_t overflows);

 private:
  LossScalerOptions options_;
  bool is_dynamic_ = false;
  double scale_ = 1;
  int64_t good_steps_ = 0;  // since the scale last changed, or an overflow
  int64_t overflows_ = 0;   // that count towards the hysteresis
};

// Throws Error naming the option.
void validate(const LossScalerOptions& options);

}  // namespace kiln
