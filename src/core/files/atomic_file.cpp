#include "core/files/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/error.h"

namespace kiln {

namespace {

// Locks what `fd` is open on for as long as `fd` is open. Returns false if somebody else has locked it. Some
// network file systems cannot lock: then nothing that is left there counts as left.
bool lock_new(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

bool is_same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Opens and locks a new file or folder. Returns -1, with errno EEXIST where the name is taken.
int create(const std::string& path, PartialPath::Kind kind) {
  const bool is_file = kind == PartialPath::Kind::kFile;
  if (!is_file && ::mkdir(path.c_str(), 0777) != 0) return -1;
  const int flags = is_file ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY | O_DIRECTORY | O_NOFOLLOW;
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) {
    if (!is_file && errno == ENOENT) errno = EEXIST;  // removed by somebody else, see below
    return -1;
  }
  struct stat opened {
  }, named{};
  // Between its creation and its lock it looks like something that was left, and may have been removed.
  if (lock_new(fd) && ::fstat(fd, &opened) == 0 && ::lstat(path.c_str(), &named) == 0 &&
      is_same_file(opened, named))
    return fd;
  ::close(fd);
  errno = EEXIST;
  return -1;
}

// Removes what a process left that was killed: of this user, of the same kind, and without a lock. Returns
// true if that name is free now.
bool remove_left(const std::string& path, PartialPath::Kind kind) {
  const bool is_file = kind == PartialPath::Kind::kFile;
  struct stat named {
  }, opened{};
  if (::lstat(path.c_str(), &named) != 0) return errno == ENOENT;
  if (named.st_uid != ::geteuid() || !(is_file ? S_ISREG(named.st_mode) : S_ISDIR(named.st_mode)))
    return false;
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | (is_file ? 0 : O_DIRECTORY));
  if (fd < 0) return errno == ENOENT;
  const bool is_left = ::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::fstat(fd, &opened) == 0 &&
                       ::lstat(path.c_str(), &named) == 0 && is_same_file(opened, named);
  std::error_code error;
  if (is_left) std::filesystem::remove_all(path, error);  // under the lock, which its writer would hold
  ::close(fd);
  return is_left && !error;
}

}  // namespace

PartialPath::PartialPath(std::string who, std::string path, Kind kind)
    : who_(std::move(who)), path_(std::move(path)) {
  std::error_code unreadable;  // then creating it says why
  if (kind == Kind::kFile && std::filesystem::is_directory(path_, unreadable))
    fail_with_errno(who_, "write", path_, EISDIR);
  constexpr int kMostTries = 1000;  // others write the same, or something else stands in the way
  for (int tries = 0, number = 1; tries < kMostTries; ++tries) {
    partial_ = path_ + (number == 1 ? ".kiln.partial" : fmt::format(".kiln-{}.partial", number));
    fd_ = create(partial_, kind);
    if (fd_ >= 0) return;
    if (errno != EEXIST) fail_with_errno(who_, "write", path_, errno);
    if (!remove_left(partial_, kind)) ++number;
  }
  fail_with_errno(who_, "write", path_, EEXIST);
}

PartialPath::~PartialPath() {
  std::error_code ignored;
  if (!is_committed_) std::filesystem::remove_all(partial_, ignored);
  ::close(fd_);  // last, for the lock
}

void PartialPath::commit() {
  if (::fsync(fd_) != 0 && errno != EINVAL)  // EINVAL: this file system does not sync folders
    fail_with_errno(who_, "write", path_, errno);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail_with_errno(who_, "rename to", path_, errno);
  is_committed_ = true;
  // Syncs the folder too, so that the rename survives a power cut. Some file systems cannot sync a folder.
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int folder_fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) return;
  ::fsync(folder_fd);
  ::close(folder_fd);
}

AtomicFile::AtomicFile(std::string who, std::string path)
    : partial_(std::move(who), std::move(path), PartialPath::Kind::kFile) {}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kMaxWrite = std::size_t{1} << 30;  // Linux writes at most 2 GiB at once
  while (!bytes.empty()) {
    const ssize_t written = ::write(partial_.fd(), bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_with_errno(partial_.who(), "write", partial_.target(), errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    size_ += static_cast<uint64_t>(written);
  }
}

void fail_with_errno(std::string_view who, std::string_view action, const std::string& path, int error) {
  std::string_view remedy;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    remedy = ": free some space or choose another folder";
  if (error == EACCES || error == EPERM || error == EROFS) remedy = ": choose a folder you may write to";
  if (error == ENOENT || error == ENOTDIR) remedy = ": the folder does not exist";
  if (error == EISDIR) remedy = ": it is a folder, a file name is needed";
  fail(who, "cannot {} {}: {}{}", action, path, std::strerror(error), remedy);
}

void append_whole(int fd, std::string_view who, const std::string& path, std::string_view text) {
  const off_t end = ::lseek(fd, 0, SEEK_END);
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      if (end >= 0 && ::ftruncate(fd, end) != 0) fail_with_errno(who, "cut a torn line of", path, errno);
      fail_with_errno(who, "write", path, error);
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void append_line(std::string_view who, const std::string& path, std::string_view line) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd < 0) fail_with_errno(who, "write", path, errno);
  const std::unique_ptr<const int, void (*)(const int*)> closed(&fd, [](const int* open) { ::close(*open); });
  const off_t end = ::lseek(fd, 0, SEEK_END);
  char last = '\n';
  const bool is_torn = end > 0 && ::pread(fd, &last, 1, end - 1) == 1 && last != '\n';
  append_whole(fd, who, path, fmt::format("{}{}\n", is_torn ? "\n" : "", line));
  if (::fsync(fd) != 0 && errno != EINVAL) fail_with_errno(who, "write", path, errno);
}

void write_file_atomically(const std::string& who, const std::string& path, std::string_view content) {
  AtomicFile file(who, path);
  file.write(content);
  file.commit();
}

}  // namespace kiln
