#include "core/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace kiln {

MappedFile::MappedFile(std::string_view who, const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait on a pipe
  if (fd < 0) fail(who, "cannot open {}: {}", path, std::strerror(errno));
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    fail(who, "expected a file, got something else ({})", path);
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) {
    ::close(fd);
    fail(who, "the file is empty ({}): it was cut off or never written", path);
  }
  // NORESERVE: a writable private mapping larger than memory would be refused otherwise.
  data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data_ == MAP_FAILED) fail(who, "cannot map {} ({} bytes): {}", path, size_, std::strerror(error));
}

MappedFile::~MappedFile() { ::munmap(data_, size_); }

}  // namespace kiln
