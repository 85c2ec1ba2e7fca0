#include "plan/fit/process_memory.h"

#include <algorithm>

#include "models/registry.h"
#include "parallel/machine.h"
#include "plan/price/step_timing.h"

namespace kiln {

namespace {

// What a process that gives freed memory back holds beyond its tensors, the loader's arrays and what is
// resident after a first small step: buffers of logs, checkpoints and reports, kernels of other shapes, pages
// that tensors use in part. Twice the most that was measured over widths, batches, dtypes and threads:
// benchmarks/results/budget_*.
constexpr int64_t kRunBytes = 48 << 20;
constexpr double kAllocatorShare = 0.01;
// One that keeps freed memory comes to hold up to a third more than its tensors (the same measurements): it
// keeps it where there is room for as much again.
constexpr double kKeptShare = 1;

}  // namespace

ProcessMemory frugal_process(const TrainOptions& options) {
  TrainOptions tiny;
  tiny.model.name = denoiser_families().front().name;
  tiny.model.hidden_size = 128;
  tiny.model.num_heads = 2;
  tiny.model.depth = 1;
  tiny.model.patch_size = 4;
  tiny.model.num_classes = 10;
  tiny.data.image_size = 128;
  tiny.global_batch = 8;
  tiny.compute.dtype = options.compute.dtype;
  time_steps(tiny, at::kCPU, {.plain = 1});
  return {.bytes = resident_bytes() + kRunBytes, .share = kAllocatorShare};
}

ProcessMemory keeping_process(const MachineProfile& machine) {
  return {.bytes = std::max(resident_bytes(), machine.context_bytes), .share = kKeptShare};
}

}  // namespace kiln
