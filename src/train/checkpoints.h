// Writing the training state to a run's checkpoints and reading it back.
#pragma once
#include <map>
#include <string>

#include "checkpoint/train_state.h"
#include "optim/optimizer.h"
#include "train/training_state.h"

namespace kiln {

// Weights (and untrained constants) of one buffer as f32 CPU tensors in published keys.
enum class WeightsKind { kMaster, kEma };
std::map<std::string, at::Tensor> named_weights(const TrainingState& state, WeightsKind kind,
                                                size_t ema_index = 0);

// Writes a complete checkpoint of `info.step`; updates and loss scale of `info` are filled in. Returns its
// folder. Throws Error (disk full, no permission) with earlier checkpoints untouched and nothing left behind.
std::string save_checkpoint(const std::string& run, const TrainingState& state, const Optimizer& optimizer,
                            TrainStateInfo info);

// Restores weights, EMAs, moments, updates and loss scale. Throws Error naming what is missing or misshapen.
TrainStateInfo load_checkpoint(const std::string& folder, TrainingState& state, const Optimizer& optimizer);

}  // namespace kiln
