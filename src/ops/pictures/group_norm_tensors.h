// What group norms hand to their callers and to their gradients.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/ops.h"

namespace kiln::ops {

// Both are (B, groups) in f32. They are undefined where backward makes them again from x.
struct GroupStatistics {
  at::Tensor mean, rstd;
};

struct GroupNormed {
  at::Tensor out;
  GroupStatistics statistics{};
};
struct GroupNormGrads {
  at::Tensor x, weight, bias;
};

}  // namespace kiln::ops
