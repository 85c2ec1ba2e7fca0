#include "plan/op_recorder.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <stdexcept>

#include "plan/op_work.h"

namespace kiln {

std::string_view name_of(OpClass op_class) {
  constexpr std::string_view kNames[kNumOpClasses] = {"matmul", "attention", "convolution", "elementwise"};
  return kNames[static_cast<size_t>(op_class)];
}

// What torch calls around every operation of the thread.
struct OpCallbacks {
  struct Leaf : at::ObserverContext {};
  // Who records this thread's operations. Autograd takes it, with the callbacks, to the thread that runs a
  // GPU's backward, while this one waits.
  struct Owner : c10::DebugInfoBase {
    explicit Owner(OpRecorder& its_recorder) : recorder(its_recorder) {}
    OpRecorder& recorder;
  };
  static constexpr auto kOwner = c10::DebugInfoKind::PRODUCER_INFO;
  static OpRecorder* recorder() {
    auto* owner = static_cast<Owner*>(c10::ThreadLocalDebugInfo::get(kOwner));
    return owner ? &owner->recorder : nullptr;
  }

  template <class Values>
  static const void* first_tensor(const Values& values) {
    return !values.empty() && values[0].isTensor() ? values[0].toTensor().unsafeGetTensorImpl() : nullptr;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    OpRecorder& r = *recorder();
    if (r.inside_ || kind_of(function.name(), function.overload_name()) != OpKind::kWhole) return nullptr;
    r.inside_ = true;
    r.current_ = {.name = function.name(), .phase = r.phase_, .segment = r.segment_};
    describe_inputs(r.current_, function.overload_name(), function.inputs());
    r.first_input_ = first_tensor(function.inputs());
    if (r.timed_) r.started_ = r.now();
    return std::make_unique<Leaf>();
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (!context) return;
    OpRecorder& r = *recorder();
    if (r.timed_) r.current_.seconds = std::chrono::duration<double>(r.now() - r.started_).count();
    describe_outputs(r.current_, function.outputs());
    // Meta's sums in place (engine_sums.h) go by the name of those that are not.
    if (r.current_.name == "aten::add" && r.first_input_ == first_tensor(function.outputs()))
      r.current_.name = "aten::add_";
    r.records_.push_back(std::move(r.current_));
    r.inside_ = false;
  }
};

OpRecorder::OpRecorder(bool timed, at::Device device) : timed_(timed), device_(device) {
  if (OpCallbacks::recorder()) throw std::logic_error("two recorders of operations in one thread");
  owner_ =
      std::make_unique<c10::DebugInfoGuard>(OpCallbacks::kOwner, std::make_shared<OpCallbacks::Owner>(*this));
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&OpCallbacks::start, &OpCallbacks::end)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OpRecorder::~OpRecorder() { at::removeCallback(handle_); }

void OpRecorder::begin(StepPhase phase, int64_t segment) {
  phase_ = phase;
  segment_ = static_cast<int32_t>(segment);
}

void OpRecorder::end(StepPhase, int64_t) { segment_ = -1; }

size_t OpRecorder::num_recorded() const { return records_.size(); }

std::vector<OpRecord> OpRecorder::take() { return std::exchange(records_, {}); }

OpRecorder::Clock::time_point OpRecorder::now() const {
  if (device_.is_cuda()) at::accelerator::synchronizeDevice(device_.index());
  return Clock::now();
}

}  // namespace kiln
