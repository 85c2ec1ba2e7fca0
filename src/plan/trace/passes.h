// Makes steps of many passes from the spans of few. Passes of equally many images are the same program.
#pragma once
#include <vector>

#include "step/span.h"

namespace kiln {

// The first pass begins the gradients; the second ends the first one's reductions; the third is like all that
// follow, and the fourth begins as they do; the last reduces what was kept.
inline constexpr int64_t kDistinctPasses = 5;

// Turns a step of kDistinctPasses whole passes, and maybe a rest, into one of `num_whole`. Its fourth pass
// comes to stand for all between the third and the last, with what each leaves behind until the step ends.
void fold_equal_passes(RecordedStep& step, int64_t num_whole);

// A micro-step of a trace that has kTracedPasses passes.
struct Pass {
  const RecordedStep* from = nullptr;
  int64_t micro_step = 0;
};
inline constexpr int64_t kTracedPasses = 3;

// Returns a step of these passes that ends as `end` does. All are of one rank.
RecordedStep step_of_passes(const std::vector<Pass>& passes, const RecordedStep& end);

}  // namespace kiln
