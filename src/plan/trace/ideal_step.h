// The ideal list of a training step: what the model's definition asks for, not what Kiln's operations do.
#pragma once
#include <vector>

#include "train/setup.h"
#include "watch/step_bound.h"

namespace kiln {

// Returns what one of `world_size` ranks computes and moves in a step on images of the largest lane with
// captions of the mean length. Backward takes twice the FLOPs of forward, or as many if the weights are
// frozen. Weights, gradients and training state on the device are read once and written once, and so is what
// each product of a forward takes. A loss's head counts only with its state. Throws Error for options that
// cannot be trained.
std::vector<IdealSegment> ideal_step(const TrainOptions& options, const DataShape& data,
                                     int64_t world_size = 1);

}  // namespace kiln
