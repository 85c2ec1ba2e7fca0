#include "checkpoint/file_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/file_space.h"

namespace kiln {

namespace {

constexpr const char* kWho = "checkpoint";

void write_at(int fd, const std::string& path, uint64_t offset, std::span<const std::byte> bytes) {
  constexpr size_t kMaxWrite = size_t{1} << 30;  // Linux writes at most 2 GiB at once
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(fd, bytes.data(), std::min(bytes.size(), kMaxWrite), static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_with_errno(kWho, "write", path, errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

}  // namespace

void create_file_of_parts(const std::string& path, uint64_t bytes, std::string_view head) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail_with_errno(kWho, "write", path, errno);
  try {
    if (const int error = reserve_file_space(fd, static_cast<int64_t>(bytes)))
      fail_with_errno(kWho, "write", path, error);
    write_at(fd, path, 0, std::as_bytes(std::span(head.data(), head.size())));
  } catch (...) {
    ::close(fd);
    throw;
  }
  if (::close(fd) != 0) fail_with_errno(kWho, "write", path, errno);
}

FileParts::FileParts(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
      const int error = errno;
      for (const int opened : fds_) ::close(opened);
      fail_with_errno(kWho, "write", path, error);
    }
    fds_.push_back(fd);
  }
}

FileParts::FileParts(FileParts&& other) noexcept
    : paths_(std::move(other.paths_)), fds_(std::exchange(other.fds_, {})) {}

FileParts::~FileParts() {
  for (const int fd : fds_) ::close(fd);
}

void FileParts::write(size_t file, uint64_t offset, std::span<const std::byte> bytes) {
  write_at(fds_.at(file), paths_.at(file), offset, bytes);
}

void FileParts::sync() {
  for (size_t file = 0; file < fds_.size(); ++file)
    if (::fsync(fds_[file]) != 0) fail_with_errno(kWho, "write", paths_[file], errno);
}

}  // namespace kiln
