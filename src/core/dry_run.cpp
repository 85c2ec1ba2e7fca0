#include "core/dry_run.h"

namespace kiln {

namespace {
thread_local DryRunDevice current = DryRunDevice::kNone;
}  // namespace

DryRunDevice dry_run_device() { return current; }

DryRunScope::DryRunScope(DryRunDevice device) : before_(current) { current = device; }
DryRunScope::~DryRunScope() { current = before_; }

}  // namespace kiln
