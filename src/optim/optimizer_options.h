// Which optimizer trains, and its settings.
#pragma once
#include <string>
#include <vector>

namespace kiln {

struct OptimizerOptions {
  std::string name = "adamw";                                       // one of optimizer_names()
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;  // eps: AdamW's
  double beta3 = 0.9999, clip_threshold = 1;                        // CAME's
  std::vector<double> came_eps = {1e-30, 1e-16};
  double max_grad_norm = 0;  // the gradient is clipped to it; 0: off
};

}  // namespace kiln
