#include "core/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/files/file_system.h"

namespace kiln {

int open_input(std::string_view who, const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
    throw NoSuchFile(fmt::format("[{}] cannot read {}: {}", who, path, std::strerror(errno)));
  if (fd < 0) fail(who, "cannot read {}: {}", path, std::strerror(errno));
  struct stat status {};
  if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) return fd;
  ::close(fd);
  throw NoSuchFile(fmt::format("[{}] cannot read {}: expected a file, it is a {}", who, path,
                               S_ISDIR(status.st_mode) ? "folder" : "pipe or a device"));
}

std::string read_input(std::string_view who, const std::string& path, size_t most_bytes) {
  const RandomAccessFile file(std::string(who), path);
  if (static_cast<uint64_t>(file.size()) > most_bytes)
    fail(who, "cannot read {}: expected at most {} bytes, it has {}", path, most_bytes, file.size());
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

RandomAccessFile::RandomAccessFile(std::string who, std::string path)
    : who_(std::move(who)), path_(std::move(path)), fd_(open_input(who_, path_)) {
  struct stat status {};
  if (::fstat(fd_, &status) == 0) size_ = status.st_size;
}

RandomAccessFile::~RandomAccessFile() { ::close(fd_); }

std::vector<std::byte> RandomAccessFile::read(int64_t offset, int64_t count) const {
  check(offset, count);
  std::vector<std::byte> bytes(count);
  read(offset, bytes);
  return bytes;
}

void RandomAccessFile::check(int64_t offset, int64_t count) const {
  if (offset < 0 || count < 0 || count > size_ - offset)
    fail(who_, "expected {} bytes at {}, got a file of {} ({})", count, offset, size_, path_);
}

void RandomAccessFile::read(int64_t offset, std::span<std::byte> to) const {
  check(offset, std::ssize(to));
  const int64_t got = read_at(fd_, to, offset);
  if (got < 0) fail(who_, "cannot read {}: {}", path_, std::strerror(errno));
  if (got < std::ssize(to)) fail(who_, "{} became shorter while it was read", path_);
}

std::vector<std::byte> read_file(const std::string& who, const std::string& path) {
  const RandomAccessFile file(who, path);
  return file.read(0, file.size());
}

bool LineReader::next(std::string& line) {
  constexpr int64_t kAtOnce = 1 << 16;
  line.clear();
  while (true) {
    const size_t end = block_.find('\n', begin_);
    is_whole_ = end != std::string::npos;
    line.append(block_, begin_, is_whole_ ? end - begin_ : end);
    begin_ = is_whole_ ? end + 1 : 0;
    if (is_whole_) return true;
    block_.resize(static_cast<size_t>(std::min(kAtOnce, file_.size() - offset_)));
    if (block_.empty()) return !line.empty();
    file_.read(offset_, std::as_writable_bytes(std::span(block_)));
    offset_ += std::ssize(block_);
  }
}

}  // namespace kiln
