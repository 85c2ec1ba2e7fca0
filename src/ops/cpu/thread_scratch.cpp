#include "ops/cpu/thread_scratch.h"

#include <cstdlib>
#include <memory>

#include "core/error.h"

namespace kiln::ops::cpu {
namespace {

thread_local std::unique_ptr<void, decltype(&std::free)> scratch_memory(nullptr, std::free);
thread_local std::size_t scratch_memory_bytes = 0;

}  // namespace

void* thread_scratch(std::size_t bytes) {
  if (scratch_memory_bytes < bytes) {
    scratch_memory.reset();
    scratch_memory.reset(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    scratch_memory_bytes = scratch_memory ? bytes : 0;
    if (!scratch_memory) fail("memory", "expected {} bytes of scratch, got none: out of memory", bytes);
  }
  return scratch_memory.get();
}

}  // namespace kiln::ops::cpu
