// The operations that a piece of program runs, with their work: what a machine profile prices. Seen through
// torch's RecordFunction, on meta tensors (plan) or with times on a real device (calibration).
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train/step_observer.h"

namespace c10 {
class DebugInfoGuard;
}

namespace kiln {

enum class OpClass {
  kMatmul,
  kAttention,
  kConvolution,
  kElementwise
};  // elementwise: bound by memory traffic
inline constexpr int kNumOpClasses = 4;
std::string_view name_of(OpClass op_class);  // "matmul"

// One leaf operation: "kiln::affine", "aten::mul", ... An operation that torch composes of others counts as
// these; one with a kernel of its own, and a marked one of Kiln's (ops/op_mark.h), counts whole. So the same
// step gives the same operations on every device. Those that move no data (views, empty) are not recorded.
struct OpRecord {
  std::string name;
  OpClass op_class = OpClass::kElementwise;
  at::ScalarType dtype = at::kFloat;  // of the operands of products and attention; elsewhere of the result
  double flops = 0;                   // multiply-adds times two, as executed; 0 for elementwise
  double bytes = 0;                   // read and written, each tensor once
  int64_t m = 0, n = 0,
          k = 0;  // of a matrix product (batch in m); attention: batch * heads, tokens, head dim
  StepPhase phase{};
  int32_t segment = -1;
  double seconds = 0;  // measured; 0 when not timed
  int64_t times = 1;   // that it runs in the step: a trace holds one of many equal micro-steps
};

// Records the leaf operations of this thread, and of autograd's on its behalf, while in scope, one recorder
// at a time; as observer of a step it notes whose they are.
class OpRecorder : public StepObserver {
 public:
  // timed: measures the seconds of each. On a CUDA device that synchronises around every operation.
  explicit OpRecorder(bool timed, at::Device device = at::kCPU);
  ~OpRecorder() override;
  OpRecorder(const OpRecorder&) = delete;
  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase phase, int64_t segment) override;
  size_t num_recorded() const;  // since the last take()
  // What was recorded since the last call.
  std::vector<OpRecord> take();

 private:
  friend struct OpCallbacks;
  using Clock = std::chrono::steady_clock;
  Clock::time_point now() const;

  bool timed_;
  at::Device device_;
  std::unique_ptr<c10::DebugInfoGuard> owner_;  // makes this the recorder of the thread
  uint64_t handle_ = 0;
  StepPhase phase_{};
  int32_t segment_ = -1;
  bool inside_ = false;                // a leaf operation: what it calls is part of it
  OpRecord current_;                   // that leaf
  const void* first_input_ = nullptr;  // of it, to tell a result in place
  Clock::time_point started_;          // and when
  std::vector<OpRecord> records_;
};

}  // namespace kiln
