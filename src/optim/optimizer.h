// Optimizers over flat memory. A new one is a class in a file of its own and a line in registry.cpp.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace kiln {

// One unit's flat state, or any slice of it: all 1-D of the same length.
struct OptimizerSlice {
  at::Tensor master;                // f32
  at::Tensor grads;                 // f32, bf16 or fp16
  std::vector<at::Tensor> moments;  // f32, in the order of moment_names()
  std::vector<ops::EmaSlice> emas{};
  at::Tensor* compute_weights = nullptr;  // bf16/fp16 copy to refresh; null when the master is computed with
};

struct OptimizerStep {
  double lr = 0;
  int64_t update = 1;         // 1-based count of applied updates, for bias correction
  double grad_scale = 1;      // gradients are multiplied by this first: 1 / loss scale * clip coefficient
  at::Tensor device_scale{};  // 0-d f32 on the device, in the place of grad_scale; NaN: nothing moves. Only
                              // for optimizers that read it
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::vector<std::string> moment_names() const = 0;  // as saved in checkpoints
  // True for optimizers that look at rows and columns (CAME): ZeRO then splits by tensor, not by element.
  virtual bool needs_whole_tensors() const = 0;
  // Whether it takes OptimizerStep::device_scale.
  virtual bool reads_device_scale() const { return false; }
  // Moves the master, the moments, the EMAs and the compute weights in one pass.
  virtual void step(OptimizerSlice& slice, const OptimizerStep& step) const = 0;
};

// config: {"type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}. Throws Error for an
// unknown type or key, naming the known ones.
std::unique_ptr<Optimizer> make_optimizer(const nlohmann::json& config);
std::vector<std::string> optimizer_names();

struct OptimizerOptions {
  std::string name = "adamw";  // one of optimizer_names()
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double max_grad_norm = 0;  // the gradient is clipped to it; 0: off
};
// The config for make_optimizer(). Throws Error.
nlohmann::json optimizer_config_of(const OptimizerOptions& options);

}  // namespace kiln
