// Control of the process's heap, if it is jemalloc.
#pragma once

namespace kiln {

// Makes freed memory go back to the system at once, instead of waiting for its next use, and new memory come
// in small pages. Resident memory is then what is in use. This costs page faults. With an allocator other
// than jemalloc it only makes the pages small.
void return_freed_memory();

}  // namespace kiln
