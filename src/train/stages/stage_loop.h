// One stage of a run, from its newest checkpoint to its end: it trains, logs, validates, samples and saves.
#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/json.h"
#include "core/stop_signal.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_saver.h"
#include "train/progress.h"
#include "train/resume.h"
#include "train/run_watch.h"
#include "train/stages/run_context.h"
#include "train/stages/stages.h"
#include "watch/run_requests.h"

namespace kiln {

class StageLoop {
 public:
  // `fit` is for the plan's current stage. `is_next` is true if this process has trained the stage before.
  // `steps_ahead` is the length of the later stages, in steps of this one. REQUIRES: `plan` and `stop`
  // outlive this.
  StageLoop(const StagePlan& plan, const StageFit& fit, const RunContext& context, const StopSignal& stop,
            bool is_next, double steps_ahead);

  // Trains the stage to its end. Returns true if the caller should look for a stage that follows.
  bool train();
  bool has_trained() const { return watch_.has_value(); }
  // Called after an error: finishes a checkpoint that is being written, so that it is not lost.
  void keep_checkpoint();

 private:
  bool start();
  std::optional<TrainStateInfo> resume();
  void train_step();
  int64_t new_requests();
  void served(RunRequest request);
  std::shared_ptr<const Batch> next_batch();
  void handle_bad_step(const StepResult& result);
  void rehearse();
  void rehearse_encoders();
  void announce_stage();
  CheckpointSpace checkpoint_space() const;
  void begin_checkpoint();
  void finish_checkpoint();
  void announce_checkpoint(const std::optional<std::string>& folder);
  void refresh_report();
  void compare_with_plan();
  void validate();
  void sample();
  void evaluate();
  TrainStateInfo state_info() const;
  bool is_due(int64_t every) const { return every > 0 && progress_.step % every == 0; }
  bool is_asked(RunRequest request) const { return (asked_ & bit_of(request)) != 0; }
  bool stopping() const { return run_.is_alone() ? stop_.requested() : agreed_stop_; }

  const StopSignal& stop_;
  const StagePlan& plan_;
  TrainingRun run_;
  Progress progress_;
  nlohmann::json predicted_;
  bool saves_the_end_ = true, audits_precision_ = false, is_next_ = false, is_continued_ = false;
  std::function<void(std::vector<OpRecord>)> on_timed_operations_;
  double steps_ahead_ = 0;
  RunFolder folder_;
  std::unique_ptr<CheckpointSaver> saver_;
  std::optional<RunWatch> watch_;  // once the run is built
  int64_t last_saved_ = -1;
  static constexpr std::chrono::seconds kReportPause{30};  // at least, between two reports
  std::chrono::steady_clock::time_point report_due_ = std::chrono::steady_clock::now() + kReportPause;
  bool agreed_stop_ = false;             // several ranks stop after the same step
  std::optional<RunRequests> requests_;  // rank 0's
  int64_t asked_ = 0;                    // requests that all ranks serve after this step
  bool is_stop_asked_ = false;           // by a request
  bool is_saving_asked_ = false;         // the checkpoint that is being written serves a request
};

}  // namespace kiln
