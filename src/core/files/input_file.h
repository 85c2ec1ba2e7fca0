// Opens files that others wrote, and reads them whole or in pieces. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace kiln {

// There is no file of a name, or it is none, like a folder or a pipe. What cannot be read just now is another
// Error.
class NoSuchFile : public Error {
 public:
  using Error::Error;
};

// Returns a descriptor of a regular file, to read. It waits for nobody who would write into a pipe, and
// programs that are started do not inherit it. `who` begins the messages. Throws NoSuchFile, or Error.
int open_input(std::string_view who, const std::string& path);
// Opens the same for reading line by line.
std::ifstream input_stream(std::string_view who, const std::string& path);
// Returns the content. Throws Error too if it has more than `most_bytes`.
std::string read_input(std::string_view who, const std::string& path, size_t most_bytes);

class RandomAccessFile {
 public:
  // Throws as open_input().
  RandomAccessFile(std::string who, std::string path);
  ~RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int64_t size() const { return size_; }  // bytes
  // Thread-safe. Throws Error: read error, or the file has fewer bytes.
  std::vector<std::byte> read(int64_t offset, int64_t count) const;
  void read(int64_t offset, std::span<std::byte> to) const;

 private:
  void check(int64_t offset, int64_t count) const;

  std::string who_, path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

std::vector<std::byte> read_file(const std::string& who, const std::string& path);

}  // namespace kiln
