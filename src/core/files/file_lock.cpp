#include "core/files/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace kiln {

namespace {

// Returns " (process 4711 on node03)" as the holder wrote it, or "" if it wrote nothing.
std::string holder_of(int fd) {
  char text[256];
  const ssize_t size = ::pread(fd, text, sizeof text, 0);
  return size > 0 ? fmt::format(" ({})", std::string_view(text, static_cast<size_t>(size))) : "";
}

// Writes who holds the lock, for those who are refused. Failing to write it does not matter.
void sign(int fd) {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const std::string text = fmt::format("process {} on {}", ::getpid(), host);
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, text.data(), text.size(), 0) < 0) return;
}

}  // namespace

FileLock::FileLock(std::string_view who, const std::string& path, std::string_view refusal) {
  const bool is_folder = std::filesystem::is_directory(path);
  fd_ = is_folder ? ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                  : ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(who, "cannot open {}: {}", path, std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    const std::string holder = is_folder ? "" : holder_of(fd_);
    ::close(fd_);
    fail(who, "{}{}", refusal, holder);
  }
  if (!is_folder) sign(fd_);
}

FileLock::~FileLock() { ::close(fd_); }

}  // namespace kiln
