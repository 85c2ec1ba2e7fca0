// The model with the average of its weights in their place, for a while: what a run is validated and drawn
// with.
#pragma once
#include <functional>

#include "step/training_state.h"

namespace kiln {

// Runs `work` while the weights that compute are the first EMA's; afterwards they are the trained ones again,
// to the bit. Without an EMA they stay what they are. Takes no memory: in f32, weights and average change
// places; else the copy in the compute dtype is made anew from either. Only masters in bf16 that compute
// themselves are copied meanwhile. After an error of `work` the state is not usable. A collective.
void with_first_ema(TrainingState& state, const std::function<void()>& work);

}  // namespace kiln
