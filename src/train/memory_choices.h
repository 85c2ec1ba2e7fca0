// --recompute and --offload-activations as texts, and as a choice for each segment.
#pragma once
#include <vector>

#include "models/model.h"
#include "train/step.h"
#include "train/train_config.h"

namespace kiln {

// Each option is "none", "all", or block numbers, ranges and segment names ("0-5,8,final"); where both name a
// segment it is offloaded. Throws Error naming the segments there are.
std::vector<MemoryChoice> parse_memory_choices(const TrainOptions& options, const Denoiser& denoiser);
// The same choices as the shortest such texts.
void set_memory_choices(TrainOptions& options, const std::vector<MemoryChoice>& choices,
                        const Denoiser& denoiser);

}  // namespace kiln
