// Traces of one rank's step for any number of images and passes. On a GPU they are composed of the traces of
// two where these are of one program: in it, every allocation and every operation is affine in the images of
// a pass.
#pragma once
#include <map>
#include <tuple>

#include "plan/trace/trace.h"

namespace kiln {

class TraceFamily {
 public:
  // `most_images`: the largest pass that will be asked for.
  TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device, int64_t most_images);

  // The step of `images` in passes of `micro_batch`, the last one of the rest, on one rank; with gradients as
  // at `zero_stage`. At stage 0 it is the trace of a rank alone, otherwise what plan/ranks/rank_step.h makes
  // the trace of a rank from. Stays where it is.
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

// Whether both have the same spans, and these the same operations and allocations.
bool are_one_program(const StepTrace& a, const StepTrace& b);
// The trace at `images`, of those at two other numbers of images. Throws Error when these are not traces of
// the same program.
StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images);

}  // namespace kiln
