#include "data/images/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace kiln {

RandomAccessFile::RandomAccessFile(std::string who, std::string path)
    : who_(std::move(who)), path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO would wait for its writer
  if (fd_ < 0 && (errno == ENOENT || errno == ENOTDIR))
    throw NoSuchFile(fmt::format("[{}] cannot read {}: {}", who_, path_, std::strerror(errno)));
  if (fd_ < 0) fail(who_, "cannot read {}: {}", path_, std::strerror(errno));
  struct stat status {};
  const bool is_file = ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file) {
    ::close(fd_);
    throw NoSuchFile(fmt::format("[{}] expected a file, got something else ({})", who_, path_));
  }
  size_ = status.st_size;
}

RandomAccessFile::~RandomAccessFile() { ::close(fd_); }

std::vector<std::byte> RandomAccessFile::read(int64_t offset, int64_t count) const {
  if (offset < 0 || count < 0 || count > size_ - offset)
    fail(who_, "expected {} bytes at {}, got a file of {} ({})", count, offset, size_, path_);
  std::vector<std::byte> bytes(count);
  int64_t filled = 0;
  while (filled < count) {
    const ssize_t got = ::pread(fd_, bytes.data() + filled, count - filled, offset + filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(who_, "cannot read {}: {}", path_, std::strerror(errno));
    if (got == 0) fail(who_, "{} became shorter while it was read", path_);
    filled += got;
  }
  return bytes;
}

std::vector<std::byte> read_file(const std::string& who, const std::string& path) {
  const RandomAccessFile file(who, path);
  return file.read(0, file.size());
}

}  // namespace kiln
