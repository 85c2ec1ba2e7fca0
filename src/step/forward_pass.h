// The model in training as one that predicts.
#pragma once
#include <ATen/core/Tensor.h>

#include "models/model.h"
#include "parallel/zero/zero.h"

namespace kiln {

// A forward pass without gradients, segment by segment as the step walks: at stage 3 no more weights are
// whole at once than in a step. (B, out_channels, H, W). Where weights are divided, a collective; the ranks'
// inputs need not be of one size.
at::Tensor forward_pass(const Denoiser& denoiser, Zero& zero, const ModelInput& input);

}  // namespace kiln
