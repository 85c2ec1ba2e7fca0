#include "core/scratch.h"

namespace kiln {

namespace {
thread_local ScratchUse current;
thread_local uint64_t num_scopes = 0;
}  // namespace

ScratchUse current_scratch() { return current; }

ScratchScope::ScratchScope(Scratch scratch) : before_(current) { current = {scratch, ++num_scopes}; }
ScratchScope::~ScratchScope() { current = before_; }

}  // namespace kiln
