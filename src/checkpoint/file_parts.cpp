#include "checkpoint/file_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/files/atomic_file.h"
#include "core/files/file_system.h"

namespace kiln {

namespace {

constexpr const char* kWho = "checkpoint";

}  // namespace

void create_file_of_parts(const std::string& path, uint64_t bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail_with_errno(kWho, "write", path, errno);
  int error = reserve_file_space(fd, static_cast<int64_t>(bytes));
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error != 0) fail_with_errno(kWho, "write", path, error);
}

FileParts::FileParts(std::vector<std::string> paths) : paths_(std::move(paths)), checksums_(paths_.size()) {
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
    : paths_(std::move(other.paths_)),
      fds_(std::exchange(other.fds_, {})),
      checksums_(std::move(other.checksums_)) {}

FileParts::~FileParts() {
  for (const int fd : fds_) ::close(fd);
}

void FileParts::write(size_t file, uint64_t offset, std::span<const std::byte> bytes) {
  constexpr size_t kAtOnce = size_t{1} << 20;  // stays in a core's cache between its checksum and its copy
  for (size_t begin = 0; begin < bytes.size(); begin += kAtOnce) {
    const auto some = bytes.subspan(begin, std::min(kAtOnce, bytes.size() - begin));
    checksums_.at(file).add(offset + begin, some);
    if (!write_at(fds_.at(file), some, static_cast<int64_t>(offset + begin)))
      fail_with_errno(kWho, "write", paths_.at(file), errno);
  }
}

void FileParts::sync() {
  for (size_t file = 0; file < fds_.size(); ++file)
    if (::fsync(fds_[file]) != 0) fail_with_errno(kWho, "write", paths_[file], errno);
}

BackgroundWrite::BackgroundWrite(FileParts files, std::vector<FilePart> parts)
    : files_(std::move(files)), parts_(std::move(parts)), thread_([this] { run(); }) {}

BackgroundWrite::~BackgroundWrite() {
  given_up_ = true;
  wait();
}

const std::string& BackgroundWrite::wait() {
  if (thread_.joinable()) thread_.join();
  return error_;
}

void BackgroundWrite::run() {
  constexpr size_t kChunk = size_t{64} << 20;  // between two looks at given_up_
  try {
    for (const FilePart& part : parts_)
      for (size_t begin = 0; begin < part.bytes.size() && !given_up_; begin += kChunk)
        files_.write(part.file, part.offset + begin,
                     part.bytes.subspan(begin, std::min(kChunk, part.bytes.size() - begin)));
    if (!given_up_) files_.sync();
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  done_ = true;
}

}  // namespace kiln
