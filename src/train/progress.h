// How far a run has come, in steps and in seconds. Either may end it.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "run/train_options.h"

namespace kiln {

class Progress {
 public:
  // The stage of these options begins after `first_step`.
  explicit Progress(const TrainOptions& options, int64_t first_step = 0)
      : first_step_(first_step), max_steps_(options.max_steps), max_seconds_(options.max_minutes * 60) {}

  int64_t step = 0;       // the last one taken
  int64_t bad_steps = 0;  // non-finite steps in a row, up to the last one

  // Sets how long earlier processes trained this run.
  void resume(double earlier_seconds) { earlier_seconds_ = seconds_ = earlier_seconds; }
  void start_clock() { begin_ = Clock::now(); }
  // Sets the time spent in training, after each step. Several ranks agree on that of rank 0, which arrives
  // with the step, so that all stop at the same one.
  void agree(double seconds) { seconds_ = seconds; }

  double clock_seconds() const {
    return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  double seconds() const { return seconds_; }
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
  double earlier_seconds_ = 0, seconds_ = 0;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace kiln
