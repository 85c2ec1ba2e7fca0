// AdamW with moments of 8 bits (Dettmers et al. 2022), in bitsandbytes' layout: each value is an index into a
// table of 256 values, which are scaled by the largest magnitude in its block of 256 elements.
#pragma once
#include "ops/update/adamw_8bit.h"
#include "optim/adamw.h"

namespace kiln {

class AdamW8bit : public Optimizer {
 public:
  static constexpr int64_t kBlock = ops::kBlockOf8Bits;
  static constexpr int64_t kFewestElements = 4096;  // smaller tensors keep f32 moments

  explicit AdamW8bit(const AdamWOptions& options) : options_(options) {}
  std::vector<StateBuffer> state(const FlatLayout& layout) const override;
  int64_t alignment() const override { return kBlock; }  // no block is divided among ranks
  void step(OptimizerSlice& slice, const OptimizerStep& step) const override;

 private:
  AdamWOptions options_;
};

}  // namespace kiln
