// AdamW (Loshchilov & Hutter 2019), as torch.optim.AdamW computes it.
#pragma once
#include "optim/optimizer.h"

namespace kiln {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;  // decoupled; DiT trains without
};

class AdamW : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}
  std::vector<std::string> moment_names() const override { return {"exp_avg", "exp_avg_sq"}; }
  bool needs_whole_tensors() const override { return false; }
  bool reads_device_scale() const override { return true; }
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override;

 private:
  AdamWOptions options_;
};

// Reads betas, eps and weight_decay of an optimizer config. Throws Error for values that cannot train.
AdamWOptions parse_adamw(const nlohmann::json& config);

}  // namespace kiln
