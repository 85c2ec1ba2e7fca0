// CAME (Luo et al. 2023). The mean of squared gradients is kept as row and column means. So is the mean
// squared distance of updates from their average, which scales that average.
#pragma once
#include "optim/came_shape.h"
#include "optim/optimizer.h"

namespace kiln {

class Came : public Optimizer {
 public:
  explicit Came(const CameOptions& options) : options_(options) {}
  std::vector<StateBuffer> state(const FlatLayout& layout) const override;
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override;

 private:
  CameOptions options_;
};

// Reads betas, eps, clip_threshold, weight_decay and variant of an optimizer config. Throws Error for values
// that cannot train.
CameOptions parse_came(const nlohmann::json& config, CameVariant variant);

}  // namespace kiln
