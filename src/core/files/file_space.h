// Space on a disk, promised before anything is written. Torch-free.
#pragma once
#include <cstdint>

namespace kiln {

// Makes the file `bytes` long and reserves the blocks; where the file system cannot promise them, only the
// length. Returns 0, or the errno.
int reserve_file_space(int fd, int64_t bytes);

}  // namespace kiln
