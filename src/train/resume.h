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
  std::optional<Checkpoint> checkpoint{};  // none: there has been none
  std::vector<std::string> damaged{};      // on rank 0: what is wrong with those that were passed over
};

// The newest checkpoint of `run` whose files have the bytes that were written, the same on every rank; each
// reads a part of them. Newer ones that are complete but for their bytes are set aside under another name.
// Throws Error on every rank when one cannot see what rank 0 sees, or when there are checkpoints but all are
// damaged. A collective.
NewestCheckpoint newest_checkpoint(const std::string& run, ProcessGroup& group);

struct RunFolder {
  std::unique_ptr<FileLock> lock{};  // rank 0's: no other process may train here while it lives
  std::string checkpoint{};          // the one to go on from; empty: the run begins here
  int64_t step = 0;                  // that it is of
};
// Makes the run folder and takes it for this run. Warns of damaged checkpoints and of what makes further bits
// differ from those of an uninterrupted run. `now`: the state before the first step of this process.
// `plan`: of the stage to train; where the newest whole checkpoint is not the one that it was made by,
// nothing is compared. Throws
// Error on every rank: another process trains there, a run of other settings or on other data, no permission.
// A collective.
RunFolder open_run_folder(const TrainingRun& run, const TrainStateInfo& now, const StagePlan& plan);

}  // namespace kiln
