// The operations that a piece of program runs, with their work: what a machine profile prices. Seen through
// torch's RecordFunction, on meta tensors (plan) or with times on a real device (calibration).
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>

#include "step/span_recorder.h"

namespace c10 {
class DebugInfoGuard;
}

namespace kiln {

// Records the leaf operations of this thread, and of autograd's on its behalf, while in scope, one recorder
// at a time.
class OpRecorder : public OpSource {
 public:
  struct Options {
    // Measures the seconds of each. On a CUDA device that synchronises around every operation, for whose time
    // as much is taken off as an operation on a single element takes so: launches and synchronisation.
    bool timed = false;
    bool checks_values = false;  // looks for overflows in every result, outside of the times
    at::Device device = at::kCPU;
  };
  explicit OpRecorder(const Options& options);
  explicit OpRecorder(bool timed, at::Device device = at::kCPU)
      : OpRecorder(Options{.timed = timed, .device = device}) {}
  ~OpRecorder() override;
  OpRecorder(const OpRecorder&) = delete;
  size_t num_recorded() const override { return records_.size(); }
  std::vector<OpRecord> take() override { return std::exchange(records_, {}); }

 private:
  friend struct OpCallbacks;
  using Clock = std::chrono::steady_clock;
  Clock::time_point now() const;
  void measure_empty();

  bool timed_, checks_values_;
  at::Device device_;
  std::unique_ptr<c10::DebugInfoGuard> owner_;  // makes this the recorder of the thread
  uint64_t handle_ = 0;
  bool inside_ = false;                // a leaf operation: what it calls is part of it
  OpRecord current_;                   // that leaf
  const void* first_input_ = nullptr;  // of it, to tell a result in place
  Clock::time_point started_;          // and when
  double empty_seconds_ = 0;           // that timing itself takes
  std::vector<OpRecord> records_;
};

}  // namespace kiln
