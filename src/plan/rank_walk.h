// The step of one of several ranks, composed of the trace of one rank that keeps everything: what the model
// does is the same; the real flat units and their ZeRO are called around it as the step calls them.
#pragma once
#include "plan/sharding.h"

namespace kiln {

// What trace_step() says of rank 0 of `sharding`: operations, collectives, bytes. What an offloaded optimizer
// does is left out, but for what it holds. `trace`: of one rank at stage 0, or of other ranks at the same
// stage; of another stage only the bytes are right.
StepTrace trace_of_rank(const StepTrace& trace, const Sharding& sharding);

}  // namespace kiln
