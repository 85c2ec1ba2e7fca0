// The device that the meta tensors of a dry run stand for. A dry run walks the real program on meta tensors.
// Code that allocates differently on CPU and CUDA (fp16 is only stored on a CPU, kernels need scratch) asks
// here.
#pragma once
#include <cstdint>

namespace kiln {

enum class DryRunDevice { kNone, kCpu, kCuda };
// The device that this thread's dry run stands for; kNone outside a dry run.
DryRunDevice dry_run_device();

class DryRunScope {
 public:
  explicit DryRunScope(DryRunDevice device);
  ~DryRunScope();
  DryRunScope(const DryRunScope&) = delete;

 private:
  DryRunDevice before_;
};

}  // namespace kiln
