#include "core/scratch.h"

namespace kiln {

namespace {
thread_local ScratchUse current_use;
thread_local uint64_t num_scopes = 0;
}  // namespace

ScratchUse current_scratch() { return current_use; }

ScratchScope::ScratchScope(Scratch scratch) : before_(current_use) { current_use = {scratch, ++num_scopes}; }
ScratchScope::~ScratchScope() { current_use = before_; }

}  // namespace kiln
