// An advisory lock (flock) on a file or a folder: one process at a time. Torch-free.
#pragma once
#include <string>
#include <string_view>

namespace kiln {

// Held for life; the system ends it with its process, however that ends. Some network file systems cannot
// lock: then nobody is kept out.
class FileLock {
 public:
  // `path`: a folder that exists, or a file, which is made where there is none, stays, and says who holds it.
  // `refusal` is the message when another process does, with that process at its end where that is known.
  // Throws Error.
  FileLock(std::string_view who, const std::string& path, std::string_view refusal);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

}  // namespace kiln
