// The checkpoints of a run in training: the one that it goes on from, and those that it leaves.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "core/file_lock.h"
#include "train/checkpoint_saver.h"
#include "train/run_progress.h"
#include "train/run_watch.h"
#include "train/training_run.h"

namespace kiln {

// All ranks make the same calls.
class RunCheckpoints {
 public:
  // REQUIRES: both outlive this.
  RunCheckpoints(TrainingRun& run, RunProgress& progress) : run_(run), progress_(progress) {}

  // Takes the run folder for this run, until the end of this, and finds its newest checkpoint; warns of what
  // is damaged and of what makes further bits differ. Throws Error on every rank: another process trains
  // there, a run of other settings or on other data, no permission. A collective.
  void open_folder();
  // Loads that checkpoint and readies what writes new ones. Returns what it says; nothing when the run begins
  // here. REQUIRES: the run is built. A collective.
  std::optional<TrainStateInfo> restore();

  // Begins to write one of the state as it is now; the one before is waited for. A collective.
  void begin(RunWatch& watch);
  // After a step: whether one has come to an end on the disk; if so it is told, and old ones are removed.
  void poll(RunWatch& watch);
  // The same, waiting for the one that is being written, if there is one.
  void finish(RunWatch& watch);
  bool is_saved(int64_t step) const { return last_saved_ == step; }

 private:
  TrainStateInfo info() const;
  void complete(const std::optional<std::string>& folder, RunWatch& watch);

  TrainingRun& run_;
  RunProgress& progress_;
  std::optional<FileLock> lock_;  // rank 0's
  std::string resumed_from_;      // empty: the run begins here
  std::unique_ptr<CheckpointSaver> saver_;
  int64_t last_saved_ = -1;
};

}  // namespace kiln
