#include "core/files/file_space.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace kiln {

int reserve_file_space(int fd, int64_t bytes) {
  if (bytes == 0) return 0;
  int result = 0;
  do result = ::fallocate(fd, 0, 0, bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) result = ::ftruncate(fd, bytes);
  return result == 0 ? 0 : errno;
}

}  // namespace kiln
