// The process's heap, where it is jemalloc.
#pragma once

namespace kiln {

// From here on memory that is freed goes back to the system at once, instead of waiting for its next use, and
// new memory comes in small pages: resident memory is then what is in use. Costs page faults. With another
// allocator only the pages are small.
void return_freed_memory();

}  // namespace kiln
