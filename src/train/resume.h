// The run folder, and the checkpoint in it that a run resumes from.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"
#include "core/files/file_lock.h"
#include "parallel/ranks/process_group.h"
#include "train/stages/stages.h"
#include "train/training_run.h"

namespace kiln {

struct NewestCheckpoint {
  std::optional<Checkpoint> checkpoint{};  // absent: no checkpoint yet
  std::vector<std::string> damaged{};      // on rank 0: what is wrong with those that were skipped
};

// Returns the newest checkpoint of `run` whose files have the bytes that were written, the same on every
// rank. Each rank reads a part of them. Newer complete checkpoints with damaged bytes are renamed. Throws
// Error on every rank if one cannot see what rank 0 sees, or if all checkpoints are damaged. A collective.
NewestCheckpoint newest_checkpoint(const std::string& run, ProcessGroup& group);

struct RunFolder {
  std::unique_ptr<FileLock> lock{};  // on rank 0; no other process may train here while it lives
  std::string checkpoint{};          // the one to resume from; empty: the run begins here
  int64_t step = 0;                  // of the checkpoint
};
// Makes the run folder and locks it for this run. Warns of damaged checkpoints and of what makes further bits
// differ from those of an uninterrupted run. `now` is the state before the first step of this process. `plan`
// is for the stage to train; nothing is compared if the newest undamaged checkpoint is not the one that the
// plan was made from. Throws Error on every rank: another process trains there, a run of other settings or on
// other data, no permission. A collective.
RunFolder open_run_folder(const TrainingRun& run, const TrainStateInfo& now, const StagePlan& plan);

}  // namespace kiln
