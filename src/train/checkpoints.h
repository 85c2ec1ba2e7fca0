// Saving and loading a checkpoint of the training state with any number of ranks, and copying weights to
// another denoiser.
#pragma once
#include <string>

#include "checkpoint/train_state.h"
#include "models/model.h"
#include "step/training_state.h"

namespace kiln {

enum class WeightsKind { kMaster, kEma };

// Copies all weights of the model, including untrained ones, to a denoiser of the same kind, segment by
// segment. A collective.
void copy_weights(const TrainingState& state, WeightsKind kind, size_t ema_index, const Denoiser& to);

// Writes a complete checkpoint of `info.step` (train/checkpoint_saver.h), waits for it and returns its
// folder. A collective.
std::string save_checkpoint(const std::string& run, const TrainingState& state, TrainStateInfo info);

// Restores weights, EMAs, moments, updates and loss scale, whatever number of ranks, stage and placement
// wrote them. Each rank reads its own slices. Throws Error on every rank naming what is missing or misshapen.
// A collective.
TrainStateInfo load_checkpoint(const std::string& folder, TrainingState& state);

}  // namespace kiln
