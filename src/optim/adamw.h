// AdamW (Loshchilov & Hutter 2019), as torch.optim.AdamW computes it.
#pragma once
#include "optim/optimizer.h"

namespace kiln {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;  // decoupled; DiT trains without

  ops::AdamWStep at(double lr, int64_t update, double grad_scale) const;
};

class AdamW : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}
  std::vector<StateBuffer> state(const FlatLayout&) const override {
    return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}};
  }
  bool reads_device_scale() const override { return true; }
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override;

 private:
  AdamWOptions options_;
};

// Reads betas, eps and weight_decay of an optimizer config. Throws Error for values that cannot train.
AdamWOptions parse_adamw(const nlohmann::json& config);

}  // namespace kiln
