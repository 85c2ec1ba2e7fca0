#include "core/dry_run.h"

namespace kiln {

namespace {
thread_local DryRunDevice current_device = DryRunDevice::kNone;
}  // namespace

DryRunScope::DryRunScope(DryRunDevice device) : before_(current_device) { current_device = device; }
DryRunScope::~DryRunScope() { current_device = before_; }

bool DryRunScope::is_of_gpu() { return current_device == DryRunDevice::kCuda; }

}  // namespace kiln
