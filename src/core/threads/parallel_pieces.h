// How kernels divide their work among the threads of a CPU.
#pragma once
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace kiln {

// Calls body(begin, end) for the pieces [0, size), [size, 2 size), .. of [0, count), on as many threads as
// ATen has (core/threads/pieces.h). The borders depend on count and size alone. Within a piece ATen and its
// libraries use one thread. A size is well chosen if a piece takes 10 microseconds or more.
void parallel_pieces(int64_t count, int64_t size, c10::function_ref<void(int64_t begin, int64_t end)> body);

// Returns a size in rows, a multiple of 16, for kernels that read and write rows of so many elements.
int64_t rows_of_piece(int64_t width);

}  // namespace kiln
