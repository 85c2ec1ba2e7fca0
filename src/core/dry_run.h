// A dry run walks the real program on meta tensors, which stand for those of a device: computing_device()
// (core/tensors.h) says which.
#pragma once

namespace kiln {

enum class DryRunDevice { kNone, kCpu, kCuda };

// While one is in scope, this thread's meta tensors stand for those of its device. Otherwise they stand for
// those of a CPU.
class DryRunScope {
 public:
  explicit DryRunScope(DryRunDevice device) : before_(current_) { current_ = device; }
  ~DryRunScope() { current_ = before_; }
  DryRunScope(const DryRunScope&) = delete;

  // Tells the innermost scope of this thread. Only computing_device() asks.
  static bool is_of_gpu() { return current_ == DryRunDevice::kCuda; }

 private:
  static inline thread_local DryRunDevice current_ = DryRunDevice::kNone;
  DryRunDevice before_;
};

}  // namespace kiln
