// The process's heap, where it is jemalloc.
#pragma once

namespace kiln {

// Makes freed memory go back to the system at once instead of waiting for its next use, and new memory come
// in small pages, so that resident memory is what is in use. It costs page faults. With an allocator other
// than jemalloc only the pages become small.
void return_freed_memory();

}  // namespace kiln
