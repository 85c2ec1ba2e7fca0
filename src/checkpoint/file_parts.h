// Files that several processes write together, each its own part. Torch-free.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/file_checksum.h"

namespace kiln {

// Makes a file of `bytes` bytes for FileParts to write. Reserves its space if the file system can, so that a
// full disk is noticed before anything is written. Throws Error.
void create_file_of_parts(const std::string& path, uint64_t bytes);

// Such files, opened by one process. They must exist.
class FileParts {
 public:
  // Throws Error naming a file that cannot be opened.
  explicit FileParts(std::vector<std::string> paths);
  ~FileParts();
  FileParts(FileParts&& other) noexcept;
  FileParts& operator=(FileParts&&) = delete;

  // Writes bytes of paths[file] from `offset` on. Throws Error (disk full, input/output error). REQUIRES:
  // each byte is written once.
  void write(size_t file, uint64_t offset, std::span<const std::byte> bytes);
  // Waits until what was written is on the disk. Throws Error.
  void sync();
  // The checksums of what was written here, one for each file.
  const std::vector<FileChecksum>& checksums() const { return checksums_; }

 private:
  std::vector<std::string> paths_;
  std::vector<int> fds_;
  std::vector<FileChecksum> checksums_;
};

struct FilePart {
  size_t file = 0;
  uint64_t offset = 0;
  std::span<const std::byte> bytes;
};

class BackgroundWrite {
 public:
  // Writes `parts`, whose bytes must stay as they are until it is done, then syncs all files.
  BackgroundWrite(FileParts files, std::vector<FilePart> parts);
  ~BackgroundWrite();  // gives up what is not written yet
  BackgroundWrite(const BackgroundWrite&) = delete;

  bool done() const { return done_; }
  // Waits, and returns what went wrong, or "".
  const std::string& wait();
  // The checksums of what this process wrote, one for each file. REQUIRES: wait() has returned.
  const std::vector<FileChecksum>& checksums() const { return files_.checksums(); }

 private:
  void run();

  FileParts files_;
  std::vector<FilePart> parts_;
  std::string error_;  // only the thread uses it until done_
  std::atomic<bool> done_ = false, given_up_ = false;
  std::thread thread_;
};

}  // namespace kiln
