#include "train/phase_memory.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <utility>

#include "core/allocations.h"
#include "parallel/machine.h"

namespace kiln {

PhaseMemory::Phase::Phase(PhaseMemory& memory, std::string name) : memory_(memory), name_(std::move(name)) {
  if (memory_.device_.is_cpu())
    reset_peak_cpu_bytes();
  else
    at::accelerator::resetPeakStats(memory_.device_.index());
}

PhaseMemory::Phase::~Phase() {
  const int64_t peak = memory_.device_.is_cpu() ? live_cpu_bytes().peak : peak_device_bytes(memory_.device_);
  if (peak > 0) memory_.peak_bytes_[name_] = std::max(memory_.peak_bytes_[name_], peak);
}

}  // namespace kiln
