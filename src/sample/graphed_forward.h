// A denoiser's forward pass as a CUDA graph: sampling runs one shape hundreds of times, and at small batches
// launching its kernels takes longer than they do.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "parallel/device_graph.h"
#include "sample/sampler_loop.h"

namespace kiln {

struct GraphedForwardOptions {
  std::function<std::unique_ptr<DeviceGraph>()> make_graph;
  // Told once, in one line, why passes run without a graph after all.
  std::function<void(const std::string&)> warn;
  size_t most_shapes = 8;  // each keeps its activations' memory; further shapes run without a graph
};

// Gives what `forward` gives, each time in memory of its own. The first pass of a shape runs as it is, the
// second is recorded, later ones replay: inputs are copied to where the recorded pass reads them. What the
// host reads of an input (how captions are cut) belongs to the shape. Passes in inference mode; weights must
// stay where they are.
ForwardFn graphed_forward(ForwardFn forward, GraphedForwardOptions options);

}  // namespace kiln
