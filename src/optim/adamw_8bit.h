// AdamW with moments of 8 bits (Dettmers et al. 2022), in bitsandbytes' layout: each value is a place in a
// table of 256, times the largest magnitude in its block of 256 elements.
#pragma once
#include "optim/adamw.h"

namespace kiln {

class AdamW8bit : public Optimizer {
 public:
  static constexpr int64_t kBlock = 256;            // elements that share a scale
  static constexpr int64_t kFewestElements = 4096;  // tensors of fewer keep f32 moments

  explicit AdamW8bit(const AdamWOptions& options) : options_(options) {}
  std::vector<StateBuffer> state(const FlatLayout& layout) const override;
  int64_t alignment() const override { return kBlock; }  // no block is divided among ranks
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override;

 private:
  AdamWOptions options_;
};

// The 256 values of bitsandbytes' dynamic map, ascending: from -1 to 1, or from 0 to 1. (256) f32
at::Tensor dynamic_map(bool is_signed);

}  // namespace kiln
