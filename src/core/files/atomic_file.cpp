#include "core/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace kiln {

AtomicFile::AtomicFile(std::string who, std::string path)
    : who_(std::move(who)), path_(std::move(path)), partial_path_(path_ + ".partial") {
  std::error_code unreadable;  // then open() says why
  if (std::filesystem::is_directory(path_, unreadable)) fail_with_errno(who_, "write", path_, EISDIR);
  fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_with_errno(who_, "write", path_, errno);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_path_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kMaxWrite = std::size_t{1} << 30;  // Linux writes at most 2 GiB at once
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_with_errno(who_, "write", path_, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    size_ += static_cast<uint64_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail_with_errno(who_, "write", path_, errno);
  if (::close(fd_) != 0) {
    fd_ = -1;
    const int error = errno;
    ::unlink(partial_path_.c_str());
    fail_with_errno(who_, "write", path_, error);
  }
  fd_ = -1;
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(partial_path_.c_str());
    fail_with_errno(who_, "rename to", path_, error);
  }
  // Syncs the folder too, so that the rename survives a power cut. Some file systems cannot sync a folder.
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int folder_fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) return;
  ::fsync(folder_fd);
  ::close(folder_fd);
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

void write_file_atomically(const std::string& who, const std::string& path, std::string_view content) {
  AtomicFile file(who, path);
  file.write(content);
  file.commit();
}

}  // namespace kiln
