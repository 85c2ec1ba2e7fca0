// Records the operations that a piece of program runs, with their work, which a machine profile prices. Sees
// them through torch's RecordFunction, on meta tensors (plan) or with times on a real device (calibration).
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c10 {
class DebugInfoGuard;
}

namespace kiln {

enum class OpClass { kMatmul, kAttention, kConvolution, kElementwise };  // elementwise: memory-bound

// One leaf operation: "kiln::affine", "aten::mul", ... An operation that torch composes of others is recorded
// as those others. One with a kernel of its own, or one that Kiln marks (ops/op_mark.h), is recorded as a
// whole. So the same step gives the same operations on every device. Operations that move no data (views,
// empty) are not recorded.
struct OpRecord {
  std::string name;
  OpClass op_class = OpClass::kElementwise;
  c10::ScalarType dtype = c10::kFloat;  // of the operands for products and attention, else of the result
  double flops = 0;                     // multiply-adds times two, as executed; 0 for elementwise
  double bytes = 0;                     // read and written, each tensor once
  // A product's batch is counted in m. Attention has batch * heads, tokens, head dim. Sums have their length
  // in k.
  int64_t m = 0, n = 0, k = 0;
  double seconds = 0;                  // measured; 0 when not timed
  c10::ScalarType from = c10::kFloat;  // what a copy reads; for other operations the same as dtype
  // Filled in by an audit, which looks at the values (OpRecorder::Options):
  int64_t num_overflows = 0;  // infinite or NaN results of finite inputs
  double largest = 0;         // magnitude among finite results in 16 bits
  bool by_call = false;       // a RankCall makes it
};

// While in scope, records the leaf operations of this thread and of autograd's threads on its behalf. A
// thread has one recorder at a time.
class OpRecorder {
 public:
  struct Options {
    // Measures the seconds of each operation. On a CUDA device it synchronises around each, and takes off the
    // time of an operation on a single element, which is launch and synchronisation.
    bool timed = false;
    // REQUIRES, if set: no tensor is on meta.
    bool checks_values = false;   // looks for overflows in every result, outside of the measured times
    bool keeps_operands = false;  // for take_operands()
    at::Device device = at::kCPU;
  };
  explicit OpRecorder(const Options& options);
  explicit OpRecorder(bool timed, at::Device device = at::kCPU)
      : OpRecorder(Options{.timed = timed, .device = device}) {}
  ~OpRecorder();
  OpRecorder(const OpRecorder&) = delete;
  size_t num_recorded() const { return records_.size(); }  // since the last take()
  std::vector<OpRecord> take() { return std::exchange(records_, {}); }
  // Returns what the layers, products and attentions since the last call multiplied by weights or by each
  // other.
  std::vector<at::Tensor> take_operands() { return std::exchange(operands_, {}); }

 private:
  friend struct OpCallbacks;
  using Clock = std::chrono::steady_clock;
  Clock::time_point now() const;
  void measure_empty();

  bool timed_, checks_values_, keeps_operands_;
  at::Device device_;
  std::unique_ptr<c10::DebugInfoGuard> owner_;  // makes this the recorder of the thread
  uint64_t handle_ = 0;
  bool inside_ = false;                // inside a leaf operation, which includes what it calls
  OpRecord current_;                   // that leaf
  const void* first_input_ = nullptr;  // of that leaf, to recognise a result in place
  Clock::time_point started_;          // when that leaf started
  double empty_seconds_ = 0;           // what timing itself takes
  std::vector<OpRecord> records_;
  std::vector<at::Tensor> operands_;
};

}  // namespace kiln
