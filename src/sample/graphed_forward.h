// A denoiser's forward pass as a CUDA graph: sampling runs one shape hundreds of times, and at small batches
// launching its kernels takes longer than they do.
#pragma once
#include "parallel/graph_cache.h"
#include "sample/sampler_loop.h"

namespace kiln {

// Gives what `forward` gives, each time in memory of its own (parallel/graph_cache.h). What the host reads of
// an input (how captions are cut) belongs to the shape. Passes in inference mode; weights must stay where
// they are.
ForwardFn graphed_forward(ForwardFn forward, GraphOptions options);

}  // namespace kiln
