// Checkpoints of a run, written while training goes on.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/train_state.h"
#include "run/train_options.h"
#include "step/training_state.h"
#include "train/checkpoint_files.h"

namespace kiln {

// Returns where the copy goes. kAuto depends on where the state is.
CheckpointCopy checkpoint_copy_of(CheckpointCopy asked, const StatePlacement& placement);

// Every call is a collective. One save is under way at a time.
class CheckpointSaver {
 public:
  // REQUIRES: `state` outlives this.
  CheckpointSaver(std::string run, const TrainingState& state, CheckpointCopy copy);
  // Abandons a save that is under way and leaves nothing of it.
  ~CheckpointSaver();

  // Copies the state as it is now and begins to write it as the checkpoint of info.step. Fills in updates and
  // loss scale of `info`. Throws Error on every rank: disk full, no permission, a run folder that the ranks
  // do not share. Nothing is left behind after such an error, nor after any error below. REQUIRES: none is
  // under way.
  void begin(TrainStateInfo info);
  int64_t bytes() const { return files_.file_bytes(); }  // of a checkpoint
  bool under_way() const { return save_ != nullptr; }
  // Called after a step. Returns the folder of the checkpoint once every rank's part is on the disk, else
  // nothing. Throws the Error of the first rank that could not write.
  std::optional<std::string> poll();
  // Waits for the save and returns the checkpoint's folder. REQUIRES: one is under way.
  std::string finish();

 private:
  struct Save;
  void copy_state(Save& save) const;

  std::string run_;
  const TrainingState& state_;
  CheckpointCopy copy_;
  CheckpointFiles files_;
  std::unique_ptr<Save> save_;  // under way
};

}  // namespace kiln
