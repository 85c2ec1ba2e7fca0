// Steps of many passes, made of the spans of few: passes of as many images are the same program.
#pragma once
#include <vector>

#include "step/span.h"

namespace kiln {

// The first pass begins the gradients; the second ends the first one's reductions; the third is like all that
// follow; the last reduces what was kept.
inline constexpr int64_t kDistinctPasses = 4;

// The peak without what calls on the training state allocate: a rank's trace makes those again.
int64_t own_peak_bytes(RecordedStep step);

// `step` has kDistinctPasses whole passes, and maybe a rest: its third pass comes to stand for all between
// the second and the last of `num_whole`. `peak_of_one_more`: own_peak_bytes() of the step that has one whole
// pass more, which tells what each leaves behind until the step ends.
void fold_equal_passes(RecordedStep& step, int64_t num_whole, int64_t peak_of_one_more);

// A micro-step of a trace of kTracedPasses.
struct Pass {
  const RecordedStep* from = nullptr;
  int64_t micro_step = 0;
};
inline constexpr int64_t kTracedPasses = 3;

// A step of these passes that ends as `end` does, all of one rank.
RecordedStep step_of_passes(const std::vector<Pass>& passes, const RecordedStep& end);

}  // namespace kiln
