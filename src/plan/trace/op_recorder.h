// Records the operations that a piece of program runs, with their work, which a machine profile prices. Sees
// them through torch's RecordFunction, on meta tensors (plan) or with times on a real device (calibration).
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>

#include "step/span_recorder.h"

namespace c10 {
class DebugInfoGuard;
}

namespace kiln {

// While in scope, records the leaf operations of this thread and of autograd's threads on its behalf. A
// thread has one recorder at a time.
class OpRecorder : public OpSource {
 public:
  struct Options {
    // Measures the seconds of each operation. On a CUDA device it synchronises around each, and takes off the
    // time of an operation on a single element, which is launch and synchronisation.
    bool timed = false;
    bool checks_values = false;  // looks for overflows in every result, outside of the measured times
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
  bool inside_ = false;                // inside a leaf operation, which includes what it calls
  OpRecord current_;                   // that leaf
  const void* first_input_ = nullptr;  // of that leaf, to recognise a result in place
  Clock::time_point started_;          // when that leaf started
  double empty_seconds_ = 0;           // what timing itself takes
  std::vector<OpRecord> records_;
};

}  // namespace kiln
