// A dry run of one training step: the real model, state and step of src/train on meta tensors, with every
// allocation and every operation recorded. Nothing is computed and no memory is used.
#pragma once
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "plan/op_recorder.h"
#include "train/memory_recorder.h"
#include "train/setup.h"

namespace kiln {

struct StepTrace {
  std::vector<std::string> segments;     // names, as Denoiser::segments()
  std::vector<int64_t> segment_weights;  // trainable elements of each unit, padding included
  int64_t num_weights = 0;               // trainable, padding not included
  double flops_per_image = 0;            // forward and backward, nothing recomputed: what share of peak is of
  int64_t load_peak_bytes = 0;           // the most while model and state are made
  StepMemory memory;                     // of the steady step (the first one allocates the same)
  std::vector<OpRecord> ops;
};

// One whole step (all micro-batches) of `options` on a device of the kind `device`. Throws Error for options
// that cannot be trained.
StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device);

}  // namespace kiln
