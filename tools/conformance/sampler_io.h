// What the sampler and sample verbs share.
#pragma once
#include "diffusion/sampler.h"
#include "io.h"

namespace kiln::conformance {

// Runs all steps from `noise`, or from `start_from` (B, C, H, W) noised by it where that is given, drawing
// row i of `step_noise` at step i; gives "timesteps" (S) and "samples" (S, B, C, H, W).
Tensors record_samples(Sampler& sampler, const Inputs& inputs, const DenoiseFn& denoise);

}  // namespace kiln::conformance
