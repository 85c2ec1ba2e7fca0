// The process's heap, where it is jemalloc.
#pragma once

namespace kiln {

// From here on memory that is freed goes back to the system at once, instead of waiting for its next use:
// resident memory is then what is in use. Costs page faults. Nothing happens with another allocator.
void return_freed_memory();

}  // namespace kiln
