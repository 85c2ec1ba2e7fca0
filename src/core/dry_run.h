// A dry run walks the real program on meta tensors, which stand for those of a device: computing_device()
// (core/tensors.h) says which.
#pragma once

namespace kiln {

enum class DryRunDevice { kNone, kCpu, kCuda };

// While one is in scope, this thread's meta tensors stand for those of its device. Otherwise they stand for
// those of a CPU.
class DryRunScope {
 public:
  explicit DryRunScope(DryRunDevice device);
  ~DryRunScope();
  DryRunScope(const DryRunScope&) = delete;

  static bool is_of_gpu();  // the innermost of this thread; only computing_device() asks

 private:
  DryRunDevice before_;
};

}  // namespace kiln
