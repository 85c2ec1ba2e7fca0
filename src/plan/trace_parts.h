// The pieces that a trace is made of: what happens in each of its marks, and its micro-steps.
#pragma once
#include <vector>

#include "plan/trace.h"

namespace kiln {

// Half-open ranges of one mark's operations and events. What comes before them belongs to no mark.
struct TracePart {
  size_t ops_begin = 0, ops_end = 0, events_begin = 0, events_end = 0;
};
// Of every mark. Events between two phases have the segment -1, or follow a phase without one and count to
// it.
std::vector<TracePart> parts_of(const StepTrace& trace);

// The marks that micro-steps begin with, and the one that follows the last of them.
std::vector<size_t> micro_steps_of(const StepTrace& trace);

// Finds the live bytes at the end of each mark and the most inside it, in the events.
void find_mark_bytes(StepTrace& trace);

}  // namespace kiln
