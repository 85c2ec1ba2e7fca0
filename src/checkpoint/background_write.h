// Writes one process's parts of files to the disk while its other threads go on. Torch-free.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/file_parts.h"

namespace kiln {

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
