// Makes steps of many passes from the spans of few. Passes of equally many images are the same program.
#pragma once
#include <vector>

#include "step/span.h"

namespace kiln {

// The first pass begins the gradients; the second ends the first one's reductions; the third is like all that
// follow; the last reduces what was kept.
inline constexpr int64_t kDistinctPasses = 4;

// Returns the peak without what calls on the training state allocate, as a rank's trace makes those again.
int64_t own_peak_bytes(RecordedStep step);

// Turns a step of kDistinctPasses whole passes, and maybe a rest, into one of `num_whole`. Its third pass
// comes to stand for all between the second and the last. `peak_of_one_more`: own_peak_bytes() of the step
// with one whole pass more, which shows what each leaves behind until the step ends.
void fold_equal_passes(RecordedStep& step, int64_t num_whole, int64_t peak_of_one_more);

// A micro-step of a trace that has kTracedPasses passes.
struct Pass {
  const RecordedStep* from = nullptr;
  int64_t micro_step = 0;
};
inline constexpr int64_t kTracedPasses = 3;

// Returns a step of these passes that ends as `end` does. All are of one rank.
RecordedStep step_of_passes(const std::vector<Pass>& passes, const RecordedStep& end);

}  // namespace kiln
