// The training state in a checkpoint's files, written and read back by any number of ranks, and in another
// denoiser.
#pragma once
#include <string>

#include "checkpoint/train_state.h"
#include "models/model.h"
#include "step/training_state.h"

namespace kiln {

enum class WeightsKind { kMaster, kEma };

// Copies all weights, untrained ones included, to a denoiser of the same kind, segment by segment. A
// collective.
void copy_weights(const TrainingState& state, WeightsKind kind, size_t ema_index, const Denoiser& to);

// Writes a complete checkpoint of `info.step` and waits for it (train/checkpoint_saver.h). Returns its
// folder. A collective.
std::string save_checkpoint(const std::string& run, const TrainingState& state, TrainStateInfo info);

// Restores weights, EMAs, moments, updates and loss scale, whatever ranks, stage and placement wrote them;
// each rank reads its own slices. Throws Error on every rank naming what is missing or misshapen. A
// collective.
TrainStateInfo load_checkpoint(const std::string& folder, TrainingState& state);

}  // namespace kiln
