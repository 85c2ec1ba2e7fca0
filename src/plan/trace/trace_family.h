// Traces of one rank's step for any number of images and passes. On a GPU they are composed from the traces
// of two numbers of images, if these are one program: then every allocation and every operation is affine in
// the images of a pass.
#pragma once
#include <map>
#include <tuple>

#include "plan/trace/trace.h"

namespace kiln {

class TraceFamily {
 public:
  // `most_images`: the largest pass that will be asked for.
  TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device, int64_t most_images);

  // Returns the step of `images` in passes of `micro_batch`, the last one of the rest, on one rank with
  // gradients as at `zero_stage`. At stage 0 it is the trace of a rank alone. Otherwise
  // plan/ranks/rank_step.h makes the trace of a rank from it. The reference stays valid.
  const StepTrace& at(int64_t micro_batch, int64_t images, int64_t zero_stage = 0);

 private:
  struct Kind {
    int64_t images = 0, num_passes = 1;  // one or kTracedPasses
    bool writes_gradients = false;       // in every pass
    auto operator<=>(const Kind&) const = default;
  };
  const StepTrace& equal_passes(const Kind& kind);
  const StepTrace& traced(const Kind& kind);

  TrainOptions options_;
  DataShape data_;
  DryRunDevice device_;
  int64_t low_, high_;  // images of the passes that are traced
  std::map<Kind, StepTrace> equal_;
  std::map<std::tuple<int64_t, int64_t, bool>, StepTrace> traces_;  // by micro-batch, images, writing
};

// True if both have the same spans, with the same operations and as many allocations.
bool are_one_program(const StepTrace& a, const StepTrace& b);
// Returns the trace at `images`, composed from those at two other numbers of images. Throws Error if these
// are not traces of the same program.
StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images);

}  // namespace kiln
