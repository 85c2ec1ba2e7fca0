// What AdamW's kernels multiply by.
#pragma once
#include "ops/kernel_args.h"
#include "ops/ops.h"

namespace kiln::ops {

AdamwFactors step_factors(const AdamWStep& step);

}  // namespace kiln::ops
