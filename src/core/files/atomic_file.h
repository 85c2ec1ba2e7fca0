// A file that appears whole or not at all: written as `path`.partial, fsynced, renamed. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kiln {

class AtomicFile {
 public:
  // `who` begins the messages: "[who] cannot write PATH: No space left on device ...". Throws Error.
  AtomicFile(std::string who, std::string path);
  // Removes the partial file unless commit() was called.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends. Throws Error (disk full, file size limit, input/output error).
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  uint64_t size() const { return size_; }  // bytes written so far

  // fsync, close, rename over `path`, fsync of the folder. Throws Error.
  void commit();

 private:
  std::string who_, path_, partial_path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

// Throws Error: "[who] cannot write PATH: No space left on device: free some space or choose another folder".
[[noreturn]] void fail_with_errno(std::string_view who, std::string_view action, const std::string& path,
                                  int error);

// Writes the whole content at once.
void write_file_atomically(const std::string& who, const std::string& path, std::string_view content);

}  // namespace kiln
