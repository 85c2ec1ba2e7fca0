// An advisory lock (flock) on a file or a folder: one process at a time. Torch-free.
#pragma once
#include <string>
#include <string_view>

namespace kiln {

// The lock is held while the object lives. The system releases it when the process ends, however that
// happens. Some network file systems cannot lock: then nobody is kept out.
class FileLock {
 public:
  // `path`: an existing folder, or a file. The file is created if missing, stays afterwards, and says who
  // holds the lock; it may not be a link. `refusal` is the message if another process holds it; that process
  // is added at the end if it is known. Throws Error.
  FileLock(std::string_view who, const std::string& path, std::string_view refusal);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

}  // namespace kiln
