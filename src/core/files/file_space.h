// Disk space that is reserved before anything is written. Torch-free.
#pragma once
#include <cstdint>

namespace kiln {

// Makes the file `bytes` long and reserves its blocks. If the file system cannot reserve them, only sets the
// length. Returns 0 or the errno.
int reserve_file_space(int fd, int64_t bytes);

}  // namespace kiln
