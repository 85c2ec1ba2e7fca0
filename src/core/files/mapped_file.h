// A whole file in memory, by mmap. Torch-free.
#pragma once
#include <cstddef>
#include <span>
#include <string>

namespace kiln {

// If a page cannot be read later, because the file was cut or its disk fails, the process ends with status 1
// and a line on stderr that names the file. The mapping is private: writing into it (tensors built on it may
// be changed in place) never reaches the file.
class MappedFile {
 public:
  // Throws Error "[who] ... (path)" when the file cannot be opened, is not a regular file or is empty.
  MappedFile(std::string_view who, const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // fetch() reads the pages of `bytes` into memory ahead of their use. release() drops the pages that lie
  // wholly in `bytes`; they are read again when touched. REQUIRES: nobody has written to them. Both ignore
  // bytes that belong to no MappedFile. Thread-safe.
  static void fetch(std::span<const std::byte> bytes);
  // Starts to read the pages of `bytes` and does not wait for them.
  static void prefetch(std::span<const std::byte> bytes);
  static void release(std::span<const std::byte> bytes);

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kiln
