// Optimizers over flat memory. A new one is a class in a file of its own and a line in registry.cpp.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/flat/state_buffer.h"
#include "ops/ops.h"

namespace kiln {

// One unit's flat state, or this rank's slice of it: 1-D tensors. Master, gradients, EMAs and compute weights
// have an element for each element of the slice.
struct OptimizerSlice {
  at::Tensor master;                // f32
  at::Tensor grads;                 // f32, bf16 or fp16
  std::vector<at::Tensor> moments;  // as state() describes them, in its order
  std::vector<ops::EmaSlice> emas{};
  at::Tensor* compute_weights = nullptr;  // bf16/fp16 copy to refresh; null when the master is computed with
  const FlatLayout* layout = nullptr;     // of the whole unit; for optimizers that look at tensors
  int64_t offset = 0;                     // of the slice in the unit
  // Sums a tensor, in place, over the ranks that hold the other slices, each of as many elements as this one;
  // every rank calls it as often, with as many values. Null where the slice is the whole unit.
  std::function<void(at::Tensor&)> sum{};

  // Moves the EMAs and the compute weights after the master, for optimizers without a pass that does all.
  void follow_master();
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
  // What it keeps of a unit, beside the master: zero at the start.
  virtual std::vector<StateBuffer> state(const FlatLayout& layout) const = 0;
  // Slots, and the slices of ranks, begin on a multiple of so many elements; a multiple of
  // FlatLayout::kAlignment.
  virtual int64_t alignment() const { return FlatLayout::kAlignment; }
  // Whether it takes OptimizerStep::device_scale.
  virtual bool reads_device_scale() const { return false; }
  // Moves the master, the moments, the EMAs and the compute weights.
  virtual void step(OptimizerSlice& slice, const OptimizerStep& step) const = 0;
};

// Bytes that an optimizer keeps of units of these layouts, all ranks' together, the master weights left out.
int64_t state_bytes(const Optimizer& optimizer, const std::vector<FlatLayout>& layouts);

// config: {"type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}, or {"type": "came",
// "betas": [0.9, 0.999, 0.9999], "eps": [1e-30, 1e-16], "clip_threshold": 1, "weight_decay": 0}. Throws Error
// for an unknown type or key, naming the known ones.
std::unique_ptr<Optimizer> make_optimizer(const nlohmann::json& config);
std::vector<std::string> optimizer_names();

struct OptimizerOptions {
  std::string name = "adamw";                                       // one of optimizer_names()
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;  // eps: AdamW's
  double beta3 = 0.9999, clip_threshold = 1;                        // CAME's
  std::vector<double> came_eps = {1e-30, 1e-16};
  double max_grad_norm = 0;  // the gradient is clipped to it; 0: off
};
// The config for make_optimizer(). Throws Error.
nlohmann::json optimizer_config_of(const OptimizerOptions& options);

}  // namespace kiln
