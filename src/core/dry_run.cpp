#include "core/dry_run.h"

namespace kiln {

namespace {
thread_local DryRunDevice current_device = DryRunDevice::kNone;
}  // namespace

DryRunDevice dry_run_device() { return current_device; }

DryRunScope::DryRunScope(DryRunDevice device) : before_(current_device) { current_device = device; }
DryRunScope::~DryRunScope() { current_device = before_; }

}  // namespace kiln
