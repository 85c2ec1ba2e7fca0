// Converts --recompute and --offload-activations between texts and a choice for each segment.
#pragma once
#include <vector>

#include "models/model.h"
#include "run/memory_options.h"
#include "step/step.h"

namespace kiln {

// Each option is "none", "all", or block numbers, ranges and segment names ("0-5,8,final"). A segment named
// by both is offloaded. Throws Error naming the model's segments.
std::vector<MemoryChoice> parse_memory_choices(const MemoryOptions& options, const Denoiser& denoiser);
// Writes the choices as the shortest such texts.
void set_memory_choices(MemoryOptions& options, const std::vector<MemoryChoice>& choices,
                        const Denoiser& denoiser);

}  // namespace kiln
