// The model in training as one that predicts, for validation and sample grids.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "models/model.h"
#include "parallel/zero/zero.h"
#include "step/training_state.h"

namespace kiln {

// Runs the denoiser without gradients, segment by segment as the step walks, so that at stage 3 no more
// weights are whole at once than in a step. Returns (B, out_channels, H, W). A collective where weights are
// divided; the ranks' inputs may differ in size.
at::Tensor forward_pass(const Denoiser& denoiser, Zero& zero, const ModelInput& input);

// Runs `work` with the first EMA as the weights that compute. Afterwards they are the trained weights again,
// to the bit. Without an EMA the weights stay as they are. This takes no memory: in f32, weights and average
// swap places; otherwise the copy in the compute dtype is made anew from either. Only bf16 masters that
// compute themselves are copied meanwhile. The state is unusable after an error of `work`. A collective.
void with_first_ema(TrainingState& state, const std::function<void()>& work);

}  // namespace kiln
