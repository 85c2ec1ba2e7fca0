// A denoiser's forward pass as a CUDA graph. Sampling runs one shape hundreds of times, and at small batches
// launching its kernels takes longer than running them.
#pragma once
#include "parallel/graph_cache.h"
#include "sample/sampler_loop.h"

namespace kiln {

// Returns a function that gives what `forward` gives, each time in memory of its own
// (parallel/graph_cache.h). What the host reads of an input (how captions are cut) is part of its shape. Runs
// in inference mode; weights must stay where they are.
ForwardFn graphed_forward(const ForwardFn& forward, GraphOptions options);

}  // namespace kiln
