// A term of the loss that aligns what a block knows with the clean picture: the alignment of REPA (Yu et al.
// 2024), with the sample's own latents in the place of an encoder's features.
#pragma once
#include <memory>

#include "diffusion/objective.h"
#include "models/model.h"

namespace kiln {

// Adds weight * align to an objective's loss. align = mean over the tokens n of 1 - cos(P(h_n), x_0's patch
// n), where h are the tokens that a third of the denoiser's segments put out and P is the loss's head: three
// linear layers with SiLU between them, as wide as the tokens. Held-out samples are measured without it.
// Throws Error if the segments put out no tokens.
std::unique_ptr<Objective> with_alignment(std::unique_ptr<Objective> objective, double weight,
                                          const Denoiser& denoiser, const BuildOptions& options);

}  // namespace kiln
