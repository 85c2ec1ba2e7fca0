#pragma once
#include <cstddef>

namespace kiln::ops::cpu {

// Returns so many bytes, 4096-byte aligned, of this thread, which are kept for its next call: fresh pages
// cost more than the work on small operands. Throws Error if memory is out.
void* thread_scratch(std::size_t bytes);

}  // namespace kiln::ops::cpu
