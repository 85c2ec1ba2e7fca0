// Optimizers over flat memory. A new one is a class in a file of its own and a line in registry.cpp.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/flat_layout.h"
#include "ops/ops.h"
#include "optim/optimizer_options.h"

namespace kiln {

// One unit's flat state, or this rank's slice of it: 1-D tensors. Master, gradients, EMAs and compute weights
// have an element for each element of the slice.
struct OptimizerSlice {
  at::Tensor master;                // f32
  at::Tensor grads;                 // f32, bf16 or fp16
  std::vector<at::Tensor> moments;  // as state() describes them, in its order
  std::vector<ops::EmaSlice> emas{};
  at::Tensor* compute_weights = nullptr;  // bf16/fp16 copy to refresh; null if the master itself computes
  const FlatLayout* layout = nullptr;     // of the whole unit; for optimizers that look at tensors
  int64_t offset = 0;                     // of the slice in the unit
  // Sums a tensor in place over the ranks that hold the other slices, which all have the same size. Every
  // rank must call it equally often, with equally many values. Null if the slice is the whole unit.
  std::function<void(at::Tensor&)> sum{};

  // Updates the EMAs and the compute weights from the master, for optimizers without a pass that does
  // everything.
  void follow_master();
};

// Does what OptimizerSlice::follow_master() does, for optimizers whose passes write the compute weights of
// slots. Of the compute weights it only copies the zeros between slots, because their memory may be new.
void follow_master_between_slots(OptimizerSlice& slice);

struct OptimizerStep {
  double lr = 0;
  int64_t update = 1;         // 1-based count of applied updates, for bias correction
  double grad_scale = 1;      // gradients are multiplied by this first: 1 / loss scale * clip coefficient
  at::Tensor device_scale{};  // 0-d f32 on the device, used instead of grad_scale; NaN: nothing moves. Only
                              // for optimizers that read it
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Returns what it keeps of a unit beside the master. All of it starts as zeros.
  virtual std::vector<StateBuffer> state(const FlatLayout& layout) const = 0;
  // Slots and the slices of ranks begin at a multiple of this many elements, itself a multiple of
  // FlatLayout::kAlignment.
  virtual int64_t alignment() const { return FlatLayout::kAlignment; }
  // True if it reads OptimizerStep::device_scale.
  virtual bool reads_device_scale() const { return false; }
  // Moves the master, the moments, the EMAs and the compute weights.
  virtual void step(OptimizerSlice& slice, const OptimizerStep& step) const = 0;
};

// Returns the bytes that an optimizer keeps of units of these layouts, on all ranks together and without the
// master weights.
int64_t state_bytes(const Optimizer& optimizer, const std::vector<FlatLayout>& layouts);

// config: {"type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}, or {"type": "came",
// "betas": [0.9, 0.999, 0.9999], "eps": [1e-30, 1e-16], "clip_threshold": 1, "weight_decay": 0}. Throws Error
// for an unknown type or key, naming the known ones.
std::unique_ptr<Optimizer> make_optimizer(const nlohmann::json& config);
std::vector<std::string> optimizer_names();

// The config for make_optimizer(). Throws Error.
nlohmann::json optimizer_config_of(const OptimizerOptions& options);

}  // namespace kiln
