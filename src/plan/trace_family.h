// Traces of one rank's step for any number of images and passes. On a GPU they are composed of the traces of
// two: in the same program, every allocation and every operation is affine in the images of a pass. They are
// of one rank that has all state; plan/rank_trace.h divides it.
#pragma once
#include <cstdint>
#include <map>
#include <utility>

#include "plan/trace.h"

namespace kiln {

class TraceFamily {
 public:
  // `most_images`: the largest pass that will be asked for.
  TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device, int64_t most_images);

  // The trace of a step of `images` in passes of `micro_batch`, the last one of the rest. Stays where it is.
  const StepTrace& at(int64_t micro_batch, int64_t images);

 private:
  const StepTrace& equal_passes(int64_t micro_batch, int64_t num_passes);  // one or kTracedPasses
  const StepTrace& traced(int64_t micro_batch, int64_t num_passes);

  TrainOptions options_;
  DataShape data_;
  DryRunDevice device_;
  int64_t low_, high_;  // images of the passes that are traced
  std::map<std::pair<int64_t, int64_t>, StepTrace> equal_, traces_;
};

// The trace at `images`, of those at two other numbers of images. Throws Error when these are not traces of
// the same program.
StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images);

}  // namespace kiln
