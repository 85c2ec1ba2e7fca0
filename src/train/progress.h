// How far a run has come, in steps and in seconds. Either may end it.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "run/train_options.h"

namespace kiln {

class Progress {
 public:
  // The stage of these options begins after `first_step`. A single rank (`is_alone`) uses its own clock.
  // Several ranks use the clock of rank 0, which arrives with every step, so that all stop at the same step.
  Progress(const TrainOptions& options, bool is_alone, int64_t first_step = 0)
      : first_step_(first_step),
        max_steps_(options.max_steps),
        max_seconds_(options.max_minutes * 60),
        is_alone_(is_alone) {}

  int64_t step = 0;       // the last one taken
  int64_t bad_steps = 0;  // non-finite steps in a row, up to the last one

  // Sets how long earlier processes trained this run.
  void resume(double earlier_seconds) { earlier_seconds_ = agreed_seconds_ = earlier_seconds; }
  void start_clock() { begin_ = Clock::now(); }
  void agree(double seconds) { agreed_seconds_ = seconds; }

  double clock_seconds() const {
    return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  // Returns the time spent in training, the same on every rank.
  double seconds() const { return is_alone_ ? clock_seconds() : agreed_seconds_; }
  double max_seconds() const { return max_seconds_; }  // 0: no limit
  int64_t stage_step() const { return step - first_step_; }
  // Returns the part of the stage that is done, in [0, 1]. A time limit is for the whole run, so it shapes
  // only the first stage.
  double share() const {
    const double by_steps = static_cast<double>(stage_step()) / static_cast<double>(max_steps_ - first_step_);
    return max_seconds_ > 0 && first_step_ == 0 ? std::max(by_steps, seconds() / max_seconds_) : by_steps;
  }
  bool out_of_time() const { return max_seconds_ > 0 && seconds() >= max_seconds_; }
  bool finished() const { return step >= max_steps_ || out_of_time(); }

 private:
  using Clock = std::chrono::steady_clock;
  int64_t first_step_, max_steps_;
  double max_seconds_;
  bool is_alone_;
  double earlier_seconds_ = 0, agreed_seconds_ = 0;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace kiln
